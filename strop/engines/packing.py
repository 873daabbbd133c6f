"""Rows into micro-batches: sequences end to end, a shared prompt once, a hard bound on tokens.

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

from strop.engines.attention import PackedAttention, Segment
from strop.engines.vision import Pictures, Vision, next_position
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
    """Images and videos of the prompt, in order."""

    @property
    def suffix_length(self) -> int:
        """Response tokens that are inputs: all but the last."""
        return len(self.response) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.suffix_length


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The tensors of one forward pass over N packed tokens, predicting M response tokens."""

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]; [3, 1, N] (time, height, width) where a prompt has media
    attention: PackedAttention
    hidden_index: Tensor
    """[M]: packed position whose hidden state predicts each response token."""
    targets: Tensor  # [M]
    token_index: Tensor
    """[M]: place of each response token in the batch's flat token axis."""
    pictures: Pictures | None = None
    """Media of the prompts, in the order of their tokens."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]


def split_rows(rows: Sequence[Row], *, max_tokens: int, num_devices: int = 1) -> list[list[Row]]:
    """Rows cut into micro-batches of at most `max_tokens` packed tokens per device, rows of one prompt together.

    Whole groups are placed first-fit, largest first; a group above the bound is cut, and its prompt computed
    once per piece. `num_devices` is the number of devices that share each sequence.

    Raises:
        ValueError: a single row does not fit.
    """
    per_device, max_tokens = max_tokens, max_tokens * num_devices
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        if row.num_tokens > max_tokens:
            shared = f" on each of the {num_devices} that share it" if num_devices > 1 else ""
            raise ValueError(
                f"a sample has {row.num_tokens} tokens ({len(row.prompt)} of prompt), but "
                f"engine.max_tokens_per_device is {per_device}{shared}: raise it to at least "
                f"{-(-row.num_tokens // num_devices)}, or lower data.max_prompt_tokens or data.max_response_tokens by "
                f"{row.num_tokens - max_tokens}"
            )
        groups.setdefault(row.prompt_key, []).append(row)
    pieces = [piece for group in groups.values() for piece in _cut(group, max_tokens)]
    sizes = [_packed_tokens(piece) for piece in pieces]
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
    return bins


def _packed_tokens(rows: Sequence[Row]) -> int:
    """Tokens of rows that share one prompt."""
    return len(rows[0].prompt) + sum(row.suffix_length for row in rows)


def _cut(group: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    pieces: list[list[Row]] = []
    size = max_tokens + 1
    for row in group:
        if size + row.suffix_length > max_tokens:
            pieces.append([])
            size = len(row.prompt)
        pieces[-1].append(row)
        size += row.suffix_length
    return pieces


def pack(rows: Sequence[Row], *, device: torch.device, vision: Vision | None = None) -> MicroBatch:
    """The packed tensors of these rows; rows of one prompt share its tokens wherever they stand in `rows`.

    Args:
        rows: at least one.
        device: of the tensors.
        vision: of the model that runs them, for prompts with media.

    Raises:
        ValueError: a prompt has media, and the model takes none.
    """
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.prompt_key, []).append(row)
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    segments: list[Segment] = []
    hidden, targets, tokens = [], [], []
    at = 0
    for group in groups.values():
        prompt = group[0].prompt
        prompt_start, prompt_length = at, len(prompt)
        ids.append(prompt)
        alone = len(group) == 1
        length = group[0].num_tokens if alone else prompt_length
        segments.append(Segment(start=at, length=length))
        shift = 0  # how far positions of a response are from the number of tokens before
        if group[0].media:
            placed = _media_positions(group[0], vision)
            shift = next_position(placed) - prompt_length
            positions.append(placed)
            if alone:
                positions.append(torch.arange(prompt_length, length) + shift)
        else:
            positions.append(torch.arange(length))
        at += prompt_length
        for row in group:
            suffix = row.suffix_length
            ids.append(row.response[:-1])
            if not alone:
                positions.append(torch.arange(prompt_length, prompt_length + suffix) + shift)
                segments.append(
                    Segment(start=at, length=suffix, prefix_start=prompt_start, prefix_length=prompt_length)
                )
            # The prompt's last token predicts the first response token, each response token the next one.
            place = torch.arange(at - 1, at + suffix)
            place[0] = prompt_start + prompt_length - 1
            hidden.append(place)
            targets.append(row.response)
            tokens.append(torch.arange(row.first_token, row.first_token + len(row.response)))
            at += suffix
    media = [one for group in groups.values() for one in group[0].media]
    return MicroBatch(
        input_ids=torch.cat(ids)[None].to(device),
        position_ids=joined_positions(positions).to(device),
        attention=PackedAttention(segments, device=device),
        hidden_index=torch.cat(hidden).to(device),
        targets=torch.cat(targets).to(device),
        token_index=torch.cat(tokens),
        pictures=vision.pictures(media, device=device) if media and vision is not None else None,
    )


def joined_positions(parts: Sequence[Tensor]) -> Tensor:
    """Positions [1, N] of runs of tokens [n]; [3, 1, N] where one of them is [3, n], the same in all three rows of
    the others."""
    if all(part.dim() == 1 for part in parts):
        return torch.cat(list(parts))[None]
    return torch.cat([part.expand(3, -1) for part in parts], dim=1)[:, None]


def _media_positions(row: Row, vision: Vision | None) -> Tensor:
    """Positions [3, P] of a prompt with media."""
    if vision is None:
        raise ValueError(
            "a prompt has images, but the model takes text alone: use a vision-language model with its image processor"
        )
    vision.check(row.prompt.tolist(), row.media, "a prompt")
    return vision.positions(row.prompt, row.media)
