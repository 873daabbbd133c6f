"""Rows into micro-batches: which run together, a shared prompt once, with a hard bound on tokens.

A row is a prompt and a response. Rows with the same prompt in one micro-batch form a block: the prompt's
tokens once, then each row's response. The last response token predicts nothing and is not computed.

    block:   p0 p1 p2 | a0 a1 | b0 b1 b2          responses a = a0 a1 a2, b = b0 b1 b2 b3
    predicts       a0   a1 a2   b1 b2 b3          (p2 predicts b0 as well)

How rows are cut into micro-batches never changes a result: losses are sums of per-token terms whose
weights were fixed for the whole optimizer batch (algorithms/aggregation.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from strop.engines.parallel.ranks import Parallel
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


def token_rows(
    data: DataProto, rows: Sequence[int] | None = None
) -> list[tuple[Tensor, Tensor, tuple[Media, ...]]]:
    """Of rows of a batch, each: prompt [P], response [R], and their images and videos in order.

    Args:
        data: columns prompts [B, P~] and responses [B, R~]; `media`, a tuple per row, where a row has any.
        rows: their numbers; None: all.
    """
    prompts, responses = (columns.rows(data.tensors()[name], rows) for name in ("prompts", "responses"))
    media = data.non_tensor_batch.get("media")
    shown = [()] * len(prompts)
    if media is not None:
        shown = list(media) if rows is None else [media[row] for row in rows]
    return list(zip(prompts, responses, shown, strict=True))


def prompt_key(prompt: Tensor, media: Sequence[Media]) -> Hashable:
    """Equal for rows whose prompts are equal, media included; `media` are those of prompt and response."""
    return prompt.numpy().tobytes(), *(medium.key for medium in media if medium.start < len(prompt))


def micro_batches(
    data: DataProto,
    *,
    max_tokens: int,
    parallel: Parallel,
    rows: Sequence[int] | None = None,
    max_positions: int | None = None,
) -> list[list[int]]:
    """Rows cut into micro-batches of at most `max_tokens` packed tokens per device, rows of one prompt together.

    Whole groups are placed first-fit, largest first; a group above the bound is cut, and its prompt computed
    once per piece. There are as many on every rank; the last ones of a rank may have no rows.

    Args:
        data: as for `token_rows`.
        max_tokens: of a micro-batch, on each of the devices that share its sequences.
        parallel: the ranks that pass in step.
        rows: numbers of the rows that are wanted; None: all.
        max_positions: longest sequence that the model is made for; None: any. Rotary embeddings that change with the
            longest sequence (longrope, dynamic) would change what other rows give.

    Returns:
        The numbers of the rows of each.

    Raises:
        ValueError: an empty prompt or response, or a single row does not fit.
    """
    num_devices = parallel.sp_size * parallel.cp_size
    per_device, max_tokens = max_tokens, max_tokens * num_devices
    pieces: list[list[int]] = []
    sizes: list[int] = []
    open_piece: dict[Hashable, int] = {}  # of each prompt, the piece that takes its next row
    numbers = range(len(data)) if rows is None else rows
    for row, (prompt, response, media) in zip(numbers, token_rows(data, numbers), strict=True):
        if len(prompt) == 0 or len(response) == 0:
            raise ValueError(
                f"row {row} has {len(prompt)} prompt and {len(response)} response tokens; each row needs both"
            )
        suffix_length = len(response) - 1
        num_tokens = len(prompt) + suffix_length
        if num_tokens > max_tokens:
            shared = f" on each of the {num_devices} that share it" if num_devices > 1 else ""
            raise ValueError(
                f"a sample has {num_tokens} tokens ({len(prompt)} of prompt), but "
                f"engine.max_tokens_per_device of this role is {per_device}{shared}: raise it to at least "
                f"{-(-num_tokens // num_devices)}, or lower data.max_prompt_tokens or data.max_response_tokens (of a "
                f"fine-tuning sft.data.max_tokens, of preferences prefer.data.max_tokens) by {num_tokens - max_tokens}"
            )
        if max_positions is not None and not media and num_tokens > max_positions:
            raise ValueError(
                f"a sample has {num_tokens} tokens ({len(prompt)} of prompt), but the model is made for "
                f"{max_positions} positions: lower data.max_prompt_tokens or data.max_response_tokens (of a "
                f"fine-tuning sft.data.max_tokens, of preferences prefer.data.max_tokens) by "
                f"{num_tokens - max_positions}"
            )
        key = prompt_key(prompt, media)
        piece = open_piece.get(key)
        if piece is None or sizes[piece] + suffix_length > max_tokens:
            piece = open_piece[key] = len(pieces)
            pieces.append([])
            sizes.append(len(prompt))
        pieces[piece].append(row)
        sizes[piece] += suffix_length
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(pieces)), key=lambda i: -sizes[i]):
        bin_index = next((b for b, free in enumerate(room) if free >= sizes[index]), None)
        if bin_index is None:
            bins.append([])
            room.append(max_tokens)
            bin_index = len(bins) - 1
        bins[bin_index].extend(pieces[index])
        room[bin_index] -= sizes[index]
    return bins + [[] for _ in range(parallel.max(len(bins)) - len(bins))]


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
