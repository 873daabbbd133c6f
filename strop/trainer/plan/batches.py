"""Rows of a step as the engines pack them: lengths of answers, micro-batches, and the largest one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from strop.engines.attention import Segment
from strop.trainer.plan.passes import PackedShape


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of prompts and answers, in tokens."""

    prompt: int
    mean_response: float
    max_response: int

    def quantiles(self, count: int) -> list[int]:
        """So many answers, evenly over the distribution, shortest first.

        Exponential below the limit, with the answers that would be longer cut there; all alike where the mean is the
        limit. The rate is such that the mean is right: mean = s (1 - exp(-limit / s)).
        """
        limit = float(self.max_response)
        if self.mean_response >= 0.999 * limit:
            return [self.max_response] * count
        scale = _scale(self.mean_response, limit)
        shares = [(number + 0.5) / count for number in range(count)]
        return [max(2, round(min(limit, -scale * math.log(1 - share)))) for share in shares]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, packed: the last token predicts nothing."""
        return self.prompt + self.max_response - 1


def _scale(mean: float, limit: float) -> float:
    low, high = mean, 1e4 * limit
    for _ in range(60):
        middle = math.sqrt(low * high)
        if middle * (1 - math.exp(-limit / middle)) < mean:
            low = middle
        else:
            high = middle
    return low


Group = tuple[int, tuple[int, ...]]
"""Length of a prompt, and of the answers to it."""


def groups_of(lengths: Lengths, *, num_groups: int, group_size: int) -> list[Group]:
    """Groups of answers, with long and short ones in each."""
    answers = lengths.quantiles(max(1, num_groups * group_size))
    return [(lengths.prompt, tuple(answers[number::num_groups])) for number in range(num_groups)]


def micro_batches_of(groups: Sequence[Group], *, max_tokens: int) -> list[list[Group]]:
    """Groups cut into micro-batches as `strop.engines.packing.micro_batches` cuts rows.

    Raises:
        ValueError: one sequence is longer than that.
    """
    pieces: list[Group] = []
    for prompt, answers in groups:
        open_piece: list[int] = []
        for answer in answers:
            if prompt + answer - 1 > max_tokens:
                raise ValueError(
                    f"a sequence of {prompt + answer - 1} tokens is above actor.engine.max_tokens_per_device of "
                    f"{max_tokens}: raise it, or lower data.max_prompt_tokens or data.max_response_tokens"
                )
            if open_piece and packed_tokens((prompt, (*open_piece, answer))) > max_tokens:
                pieces.append((prompt, tuple(open_piece)))
                open_piece = []
            open_piece.append(answer)
        if open_piece:
            pieces.append((prompt, tuple(open_piece)))
    bins: list[list[Group]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=packed_tokens, reverse=True):
        size = packed_tokens(piece)
        number = next((n for n, free in enumerate(room) if free >= size), None)
        if number is None:
            number = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[number].append(piece)
        room[number] -= size
    return bins


def packed_tokens(group: Group) -> int:
    """Tokens of a prompt and its answers, packed."""
    prompt, answers = group
    return prompt + sum(answer - 1 for answer in answers)


def packed_shape(groups: Sequence[Group]) -> PackedShape:
    """Segments of a micro-batch."""
    segments: list[Segment] = []
    start = num_predicted = 0
    for prompt, answers in groups:
        num_predicted += sum(answers)
        if len(answers) == 1:
            segments.append(Segment(start=start, length=prompt + answers[0] - 1))
        else:
            segments.append(Segment(start=start, length=prompt))
            behind = start + prompt
            for answer in answers:
                segments.append(
                    Segment(start=behind, length=answer - 1, prefix_start=start, prefix_length=prompt)
                )
                behind += answer - 1
        start += packed_tokens((prompt, answers))
    return PackedShape(segments=tuple(segments), num_predicted=num_predicted)
