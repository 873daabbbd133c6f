"""Experts that the tokens of an episode went to, kept beside the agent, which sees tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strop.protocol.routed_experts import RoutedExperts
from strop.protocol.trajectory import Trajectory
from strop.rollout.types import TokenOutput


@dataclass(frozen=True)
class _Read:
    """Tokens that an engine has read, with its choices for all but the last."""

    token_ids: tuple[int, ...]
    experts: RoutedExperts


class EpisodeRouting:
    """Records of the calls of an episode; a sequence gets the one that shares most tokens with it.

    A call reads what earlier ones have read or sampled once more: the first reading counts, by which its tokens were
    sampled.
    """

    def __init__(self) -> None:
        self._reads: list[_Read] = []

    def note(self, token_ids: Sequence[int], output: TokenOutput) -> None:
        """Enter the record of a call, if it has one."""
        if output.routed_experts is None:
            return
        every, experts = (*token_ids, *output.token_ids), output.routed_experts
        if (match := self._longest(every)) is not None:
            read, shared = match
            first = read.experts.first(shared).tokens
            experts = replace(experts, tokens=(*first, *experts.tokens[len(first) :]))
            if shared == len(read.token_ids):  # it goes on from there, so nothing else can
                self._reads.remove(read)
        self._reads.append(_Read(every, experts))

    def added_to(self, sequence: Trajectory) -> Trajectory:
        """A sequence with the experts of its first tokens, as far as they are known; without records as it is."""
        match = self._longest((*sequence.prompt_ids, *sequence.response_ids))
        return (
            sequence if match is None else replace(sequence, routed_experts=match[0].experts.first(match[1]))
        )

    def _longest(self, token_ids: tuple[int, ...]) -> tuple[_Read, int] | None:
        """The record that shares most first tokens with a sequence, and how many; None without any."""
        shared = [(_num_shared(read.token_ids, token_ids), read) for read in self._reads]
        count, read = max(shared, key=lambda pair: pair[0], default=(0, None))
        return None if read is None or not count else (read, count)


def _num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens that two sequences begin with alike."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    return next(index for index in range(limit) if one[index] != other[index])
