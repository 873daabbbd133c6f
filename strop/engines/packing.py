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
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.engines.parallel import Parallel
from strop.protocol import DataProto, columns
from strop.trajectory import Media


@dataclass(frozen=True)
class Row:
    """One sequence to run: a prompt, and the response tokens whose log-probs are wanted."""

    prompt: Tensor  # [P] int64, at least one token
    response: Tensor  # [R] int64, at least one token
    first_token: int
    """Index of its first response token in the batch's flat token axis."""
    prompt_key: Hashable
    """Equal for rows whose prompts are equal, media included."""
    media: tuple[Media, ...] = ()
    """Images and videos of prompt and response, in order."""

    @property
    def prompt_media(self) -> tuple[Media, ...]:
        """Those of the prompt, which rows of one prompt share."""
        return tuple(one for one in self.media if one.start < len(self.prompt))

    @property
    def response_media(self) -> tuple[Media, ...]:
        """Those that tools gave."""
        return self.media[len(self.prompt_media) :]

    @property
    def inputs(self) -> Tensor:
        """Its tokens that are inputs: all but the last of the response."""
        return torch.cat([self.prompt, self.response[:-1]])

    @property
    def suffix_length(self) -> int:
        """Response tokens that are inputs: all but the last."""
        return len(self.response) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.suffix_length


def data_rows(data: DataProto) -> list[Row]:
    """The rows of a batch, in order; equal prompts will be computed once.

    Args:
        data: columns prompts [B, P~] and responses [B, R~]; beside them `media`, images and videos of each prompt and
            response, where a row has any.

    Raises:
        ValueError: an empty prompt or response.
    """
    rows, first, media = [], 0, data.non_tensor_batch.get("media")
    pairs = zip(*(columns.rows(data.tensors()[name]) for name in ("prompts", "responses")), strict=True)
    for index, (prompt, response) in enumerate(pairs):
        if len(prompt) == 0 or len(response) == 0:
            raise ValueError(
                f"row {index} has {len(prompt)} prompt and {len(response)} response tokens; each row needs both"
            )
        own = () if media is None else media[index]
        key: Hashable = prompt.numpy().tobytes()
        if shown := [one.key for one in own if one.start < len(prompt)]:
            key = (key, *shown)
        rows.append(Row(prompt, response, first, key, own))
        first += len(response)
    return rows


def make_rows(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], media: Sequence[tuple[Media, ...]] | None = None
) -> list[Row]:
    """As `data_rows`, of token ids that are in no batch."""
    if not prompts:
        return []
    tensors = {"prompts": columns.jagged(prompts), "responses": columns.jagged(responses)}
    return data_rows(
        DataProto.from_dict(tensors, non_tensors={} if media is None else {"media": list(media)})
    )


def split_rows(rows: Sequence[Row], *, max_tokens: int, parallel: Parallel) -> list[list[Row]]:
    """Rows cut into micro-batches of at most `max_tokens` packed tokens per device, rows of one prompt together.

    Whole groups are placed first-fit, largest first; a group above the bound is cut, and its prompt computed
    once per piece. There are as many on every rank; the last ones of a rank may have no rows.

    Raises:
        ValueError: a single row does not fit.
    """
    num_devices = parallel.sp_size
    per_device, max_tokens = max_tokens, max_tokens * num_devices
    pieces: list[list[Row]] = []
    sizes: list[int] = []
    open_piece: dict[Hashable, int] = {}  # of each prompt, the piece that takes its next row
    for row in rows:
        if row.num_tokens > max_tokens:
            shared = f" on each of the {num_devices} that share it" if num_devices > 1 else ""
            raise ValueError(
                f"a sample has {row.num_tokens} tokens ({len(row.prompt)} of prompt), but "
                f"engine.max_tokens_per_device is {per_device}{shared}: raise it to at least "
                f"{-(-row.num_tokens // num_devices)}, or lower data.max_prompt_tokens or data.max_response_tokens by "
                f"{row.num_tokens - max_tokens}"
            )
        piece = open_piece.get(row.prompt_key)
        if piece is None or sizes[piece] + row.suffix_length > max_tokens:
            piece = open_piece[row.prompt_key] = len(pieces)
            pieces.append([])
            sizes.append(len(row.prompt))
        pieces[piece].append(row)
        sizes[piece] += row.suffix_length
    bins: list[list[Row]] = []
    room: list[int] = []
    for index in sorted(range(len(pieces)), key=lambda i: -sizes[i]):
        place = next((b for b, free in enumerate(room) if free >= sizes[index]), None)
        if place is None:
            bins.append([])
            room.append(max_tokens)
            place = len(bins) - 1
        bins[place].extend(pieces[index])
        room[place] -= sizes[index]
    return bins + [[] for _ in range(parallel.max(len(bins)) - len(bins))]


def joined_positions(parts: Sequence[Tensor]) -> Tensor:
    """Positions [1, N] of runs of tokens [n]; [3, 1, N] where one of them is [3, n], the same in all three rows of
    the others."""
    if all(part.dim() == 1 for part in parts):
        return torch.cat(list(parts))[None]
    return torch.cat([part.expand(3, -1) for part in parts], dim=1)[:, None]


def next_position(positions: Tensor) -> int:
    """Where the tokens after these go on; an image has fewer positions than tokens.

    Args:
        positions: [P], or [3, P] of tokens with media.
    """
    return int(positions.max()) + 1
