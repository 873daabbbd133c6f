"""Rows of a step as the engines pack them: lengths of answers, micro-batches, and the largest one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from strop.engines.packing import cut_tree
from strop.engines.prefix_tree import Node, PrefixTree
from strop.engines.segments import Segment
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


def groups_of(lengths: Lengths, *, num_samples: int, group_size: int) -> list[Group]:
    """Groups of answers, with long and short ones in each: no more than these samples need."""
    answers = lengths.quantiles(num_samples)
    num_groups = -(-num_samples // group_size)
    return [(lengths.prompt, tuple(answers[number::num_groups])) for number in range(num_groups)]


def micro_batches_of(groups: Sequence[Group], *, max_tokens: int) -> list[list[Group]]:
    """Groups cut into micro-batches as `strop.engines.packing.micro_batches` cuts rows; none is longer than that."""
    nodes: list[Node] = []
    last: list[int] = []
    rows: list[tuple[int, int]] = []
    for number, (prompt, answers) in enumerate(groups):
        root = len(nodes)
        nodes.append(Node(row=len(rows), start=0, end=prompt, parent=None))
        for answer in answers:
            last.append(len(nodes))
            nodes.append(Node(row=len(rows), start=prompt, end=prompt + answer - 1, parent=root))
            rows.append((number, answer))
    parts: list[list[Group]] = []
    for part in cut_tree(PrefixTree(nodes=tuple(nodes), last=tuple(last)), max_tokens):
        answers_of: dict[int, list[int]] = defaultdict(list)
        for row in part:
            answers_of[rows[row][0]].append(rows[row][1])
        parts.append([(groups[number][0], tuple(answers)) for number, answers in answers_of.items()])
    return parts


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
                prefix = ((start, start + prompt),)
                segments.append(Segment(start=behind, length=answer - 1, prefix=prefix))
                behind += answer - 1
        start += packed_tokens((prompt, answers))
    return PackedShape(segments=tuple(segments), num_predicted=num_predicted)
