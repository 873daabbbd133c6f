"""Rows into micro-batches: which run together, what they share once, with a hard bound on tokens.

A row is a prompt and a response. Rows that begin alike form a tree (prefix_tree.py): what they share is packed once,
and behind it the rest of each. The last response token predicts nothing and is not computed.

    a group:  p0 p1 p2 | a0 a1 | b0 b1 b2         responses a = a0 a1 a2, b = b0 b1 b2 b3
    predicts        a0   a1 a2   b1 b2 b3         (p2 predicts b0 as well)

Responses that go on alike are one run up to where they part, and the rows of an episode's turns, of which each begins
with the one before, are one run as long as the longest.

How rows are cut into micro-batches never changes a result: losses are sums of per-token terms whose
weights were fixed for the whole optimizer batch (algorithms/aggregation.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.engines.parallel.ranks import Parallel
from strop.engines.prefix_tree import PrefixTree, Row, prefix_tree
from strop.protocol import DataProto, columns
from strop.protocol.trajectory import Media


def make_rows(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], media: Sequence[tuple[Media, ...]] | None = None
) -> DataProto:
    """A batch of token ids: columns prompts [B, P~] and responses [B, R~], and `media` where it is given."""
    none = columns.from_flat(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    tensors = {
        "prompts": columns.jagged(prompts) if prompts else none,
        "responses": columns.jagged(responses) if responses else none,
    }
    return DataProto.from_dict(tensors, non_tensors={} if media is None else {"media": list(media)})


def token_rows(data: DataProto, rows: Sequence[int] | None = None, *, replays: bool = False) -> list[Row]:
    """Rows of a batch.

    Args:
        data: columns prompts [B, P~] and responses [B, R~]; `media`, a tuple per row, where a row has any.
        rows: their numbers; None: all.
        replays: with the experts of column routed_experts [B, T~, L k], where the batch has it.
    """
    prompts, responses = (columns.rows(data.tensors()[name], rows) for name in ("prompts", "responses"))
    media = data.non_tensor_batch.get("media")
    shown = [()] * len(prompts)
    if media is not None:
        shown = list(media) if rows is None else [media[row] for row in rows]
    experts: Sequence[Tensor | None] = [None] * len(prompts)
    if replays and "routed_experts" in data.tensors():
        experts = columns.rows(data.tensors()["routed_experts"], rows)
    return [
        Row(prompt=prompt, response=response, media=of_row, experts=chosen)
        for prompt, response, of_row, chosen in zip(prompts, responses, shown, experts, strict=True)
    ]


def micro_batches(
    data: DataProto,
    *,
    max_tokens: int,
    parallel: Parallel,
    max_row_tokens: int | None = None,
    rows: Sequence[int] | None = None,
    max_positions: int | None = None,
    replays: bool = False,
) -> list[list[int]]:
    """Rows cut into micro-batches of at most `max_tokens` packed tokens per device, rows that begin alike together.

    Whole trees are placed first-fit, largest first. A tree above the bound is cut: where it forks its branches are
    placed in the same way, and what is before the fork is computed once per piece. There are as many on every rank;
    the last ones of a rank may have no rows.

    Args:
        data: as for `token_rows`.
        max_tokens: of a micro-batch, on each of the devices that share its sequences.
        parallel: the ranks that pass in step.
        max_row_tokens: engine.max_tokens_per_device where `max_tokens` is less for want of memory (token_budget.py): a
            row above the bound is then a micro-batch by itself; None: such a row is refused.
        rows: numbers of the rows that are wanted; None: all.
        max_positions: longest sequence that the model is made for; None: any. Rotary embeddings that change with the
            longest sequence (longrope, dynamic) would change what other rows give.
        replays: as of `token_rows`: what goes to other experts is not shared.

    Returns:
        The numbers of the rows of each.

    Raises:
        ValueError: an empty prompt or response, or a single row does not fit.
    """
    num_devices = parallel.sp_size * parallel.cp_size
    per_device = max_tokens if max_row_tokens is None else max_row_tokens
    max_tokens, longest = max_tokens * num_devices, per_device * num_devices
    numbers = list(range(len(data)) if rows is None else rows)
    every = token_rows(data, numbers, replays=replays)
    for number, row in zip(numbers, every, strict=True):
        if len(row.prompt) == 0 or len(row.response) == 0:
            raise ValueError(
                f"row {number} has {len(row.prompt)} prompt and {len(row.response)} response tokens; each row needs "
                f"both"
            )
        if len(row) > longest:
            shared = f" on each of the {num_devices} that share it" if num_devices > 1 else ""
            raise ValueError(
                f"a sample has {len(row)} tokens ({len(row.prompt)} of prompt), but "
                f"engine.max_tokens_per_device of this role is {per_device}{shared}: raise it to at least "
                f"{-(-len(row) // num_devices)}, or lower data.max_prompt_tokens or data.max_response_tokens (of a "
                f"fine-tuning sft.data.max_tokens, of preferences prefer.data.max_tokens) by {len(row) - longest}"
            )
        if max_positions is not None and not row.media and len(row) > max_positions:
            raise ValueError(
                f"a sample has {len(row)} tokens ({len(row.prompt)} of prompt), but the model is made for "
                f"{max_positions} positions: lower data.max_prompt_tokens or data.max_response_tokens (of a "
                f"fine-tuning sft.data.max_tokens, of preferences prefer.data.max_tokens) by "
                f"{len(row) - max_positions}"
            )
    bins = [[numbers[row] for row in part] for part in cut_tree(prefix_tree(every), max_tokens)]
    return bins + [[] for _ in range(parallel.max(len(bins)) - len(bins))]


@dataclass
class _Piece:
    """Rows below a node, and the tokens there that they need."""

    num_tokens: int
    rows: list[int]


def cut_tree(tree: PrefixTree, max_tokens: int) -> list[list[int]]:
    """Rows of a tree in pieces of at most so many tokens, in ascending order in each."""
    below: dict[int | None, list[_Piece]] = defaultdict(list)
    ending: dict[int, list[int]] = defaultdict(list)
    for row, last in enumerate(tree.last):
        ending[last].append(row)
    for number in range(len(tree.nodes) - 1, -1, -1):  # what continues a node before the node
        node = tree.nodes[number]
        pieces = _first_fit(below.pop(number, [])[::-1], max_tokens - node.end)
        pieces = pieces or [_Piece(0, [])]
        pieces[0].rows += ending[number]
        for piece in pieces[::-1]:
            piece.num_tokens += len(node)
            below[node.parent].append(piece)
    return [sorted(piece.rows) for piece in _first_fit(below[None][::-1], max_tokens)]


def _first_fit(pieces: Sequence[_Piece], max_tokens: int) -> list[_Piece]:
    """Pieces joined as far as the bound allows, the largest first."""
    joined: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: -piece.num_tokens):
        found = next((other for other in joined if other.num_tokens + piece.num_tokens <= max_tokens), None)
        if found is None:
            joined.append(piece)
        else:
            found.num_tokens += piece.num_tokens
            found.rows += piece.rows
    return joined


def joined_positions(parts: Sequence[Tensor]) -> Tensor:
    """Positions [1, N] of runs of tokens [n]; [3, 1, N] where one of them is [3, n], the same in all three rows of
    the others."""
    if all(part.dim() == 1 for part in parts):
        return torch.cat(list(parts))[None]
    return torch.cat([part.expand(3, -1) for part in parts], dim=1)[:, None]


def next_position(positions: Tensor) -> int:
    """Position of the token after these; an image has fewer positions than tokens.

    Args:
        positions: [P], or [3, P] of tokens with media.
    """
    return int(positions.max()) + 1
