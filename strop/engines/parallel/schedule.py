"""Pipeline schedules: order in which stages run the forward and backward passes of micro-batches.

Rank r of P holds V runs of layers (chunks); chunk c of rank r is stage c P + r of the P V stages of the model. Every
rank knows the order of all ranks, so each knows which activations and gradients come from whom, and in which order.

    1F1B, P = 2, V = 1, four micro-batches:   rank 0   F0 F1 B0 F2 B1 F3 B2 B3
                                              rank 1   F0 B0 F1 B1 F2 B2 F3 B3

ZB-H1 divides a backward pass: B is the gradient of the inputs, which the stage before waits for, and W that of the
weights, which nobody waits for. Rank r runs W r micro-batches late, so that no rank has more than P of them in memory,
the number that rank 0 has with 1F1B:

    ZB-H1, P = 2, four micro-batches:         rank 0   F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
                                              rank 1   F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

With times T of a pass and at least P micro-batches a step waits (P - 1) (T_F + T_B + T_W) with 1F1B, a V-th of it with
interleaved stages, and (P - 1) (T_F + T_B - T_W) with ZB-H1.

Sources: one forward, one backward: Narayanan et al. 2019 (PipeDream), section 3.2; interleaved stages: Narayanan et al.
2021, arXiv:2104.04473, section 2.2.2; ZB-H1: Qi et al. 2023, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum


class PassKind(Enum):
    """Kinds of passes of a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """Without the gradients of weights where the schedule has passes for them."""
    WEIGHTS = "W"
    """Gradients of the weights."""


@dataclass(frozen=True, kw_only=True)
class StagePass:
    """One pass of a stage over a micro-batch."""

    kind: PassKind
    chunk: int
    """Number of the stage among those of its rank."""
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Message:
    """Activations that a stage hands on, or gradients that it hands back."""

    is_forward: bool
    stage: int
    """Stage that needs it."""
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """Passes of all ranks of a pipeline, in order."""

    passes: Sequence[Sequence[StagePass]]
    """Passes of each rank, in order."""
    num_chunks: int

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.passes) * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Stage that a rank has as this chunk."""
        return chunk * len(self.passes) + rank

    def needed(self, rank: int, stage_pass: StagePass) -> Message | None:
        """Message that a pass of a rank waits for; None where it begins at the tokens or the loss, and of weights."""
        stage, is_forward = self.stage(rank, stage_pass.chunk), stage_pass.kind is PassKind.FORWARD
        if stage_pass.kind is PassKind.WEIGHTS or stage == (0 if is_forward else self.num_stages - 1):
            return None
        return Message(is_forward=is_forward, stage=stage, micro_batch=stage_pass.micro_batch)

    def given(self, rank: int, stage_pass: StagePass) -> tuple[int, Message] | None:
        """Rank that waits for the result of a pass, and as what; None behind the last stage, before the first, and of
        weights."""
        is_forward = stage_pass.kind is PassKind.FORWARD
        stage = self.stage(rank, stage_pass.chunk) + (1 if is_forward else -1)
        if stage_pass.kind is PassKind.WEIGHTS or not 0 <= stage < self.num_stages:
            return None
        message = Message(is_forward=is_forward, stage=stage, micro_batch=stage_pass.micro_batch)
        return stage % len(self.passes), message

    def messages(self, sender: int, receiver: int, *, is_forward: bool) -> list[Message]:
        """Messages that one rank sends to another in one direction, in order."""
        kind = PassKind.FORWARD if is_forward else PassKind.BACKWARD
        given = [
            self.given(sender, stage_pass) for stage_pass in self.passes[sender] if stage_pass.kind is kind
        ]
        return [message for rank, message in filter(None, given) if rank == receiver]


def schedule(
    num_ranks: int, num_chunks: int, num_micro_batches: int, *, trains: bool, zero_bubble: bool = False
) -> Schedule:
    """The passes of so many micro-batches.

    Args:
        num_ranks: of the pipeline, at least 2.
        num_chunks: stages of each rank; 1 with `zero_bubble`.
        num_micro_batches: with several chunks a multiple of the ranks (`padded`).
        trains: with backward passes, as few forward passes ahead of them as keep all ranks busy; else forward passes
            alone.
        zero_bubble: gradients of weights are passes of their own (ZB-H1).

    Raises:
        ValueError: interleaved stages and a number of micro-batches that the ranks do not divide.
    """
    assert not zero_bubble or num_chunks == 1, "other settings are refused (check_axes)"
    if num_micro_batches != padded(num_micro_batches, num_ranks, num_chunks):
        raise ValueError(
            f"{num_micro_batches} micro-batches do not divide into rounds of {num_ranks} ranks; add empty ones"
        )
    every = [
        _passes(rank, num_ranks, num_chunks, num_micro_batches, trains=trains) for rank in range(num_ranks)
    ]
    if zero_bubble:
        every = [_with_passes_of_weights(passes, late=rank) for rank, passes in enumerate(every)]
    return Schedule(every, num_chunks)


def padded(num_micro_batches: int, num_ranks: int, num_chunks: int) -> int:
    """Number of micro-batches, with the empty ones that interleaved stages need."""
    if num_chunks == 1:
        return num_micro_batches
    return -(-num_micro_batches // num_ranks) * num_ranks


def _passes(
    rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int, *, trains: bool
) -> list[StagePass]:
    order = _order(num_ranks, num_chunks, num_micro_batches)
    forward = [StagePass(kind=PassKind.FORWARD, chunk=chunk, micro_batch=number) for chunk, number in order]
    if not trains:
        return forward
    backward = [
        StagePass(kind=PassKind.BACKWARD, chunk=num_chunks - 1 - chunk, micro_batch=number)
        for chunk, number in order
    ]
    ahead = num_ranks - rank - 1
    if num_chunks > 1:  # its own later chunks have to run before the first gradient comes back
        ahead = 2 * ahead + (num_chunks - 1) * num_ranks
    ahead = min(ahead, len(forward))
    both = [stage_pass for pair in zip(forward[ahead:], backward, strict=False) for stage_pass in pair]
    return [*forward[:ahead], *both, *backward[len(forward) - ahead :]]


def _with_passes_of_weights(passes: Sequence[StagePass], *, late: int) -> list[StagePass]:
    """Passes with one for the gradients of weights behind each backward pass, of a micro-batch so many before its own;
    the remaining ones at the end."""
    both: list[StagePass] = []
    waiting: deque[StagePass] = deque()
    for stage_pass in passes:
        both.append(stage_pass)
        if stage_pass.kind is PassKind.BACKWARD:
            waiting.append(replace(stage_pass, kind=PassKind.WEIGHTS))
            if len(waiting) > late:
                both.append(waiting.popleft())
    return [*both, *waiting]


def _order(num_ranks: int, num_chunks: int, num_micro_batches: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of the forward passes: rounds of as many micro-batches as ranks, each through all chunks."""
    if num_chunks == 1:
        return [(0, number) for number in range(num_micro_batches)]
    return [
        (chunk, number)
        for first in range(0, num_micro_batches, num_ranks)
        for chunk in range(num_chunks)
        for number in range(first, first + num_ranks)
    ]
