"""Groups in flight go on in later steps: rollout.max_staleness.

Before each step as many prompts are started as the bound allows. With algorithm.filter_groups, a group that cannot
teach is replaced as soon as it has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from strop.protocol.trajectory import Prompt
from strop.trainer.collectors.asynchronous import AsynchronousGroups
from strop.trainer.collectors.groups import DroppedGroups
from strop.trainer.collectors.pacing import StalenessBound
from strop.trainer.collectors.refill import Refill


class Lead:
    """Pacing of groups that are started ahead of their step, and selection of the ones that a step takes."""

    def __init__(self, bound: StalenessBound, refill: Refill) -> None:
        self._bound, self._refill = bound, refill

    def restore(self, checkpoint: Path | None, groups: AsynchronousGroups) -> list[str]:
        """The groups of a checkpoint go on; sentences that say so."""
        groups.num_started += self._refill.num_unfilled
        return groups.restore(checkpoint)

    def restart(self, step: int, groups: AsynchronousGroups) -> Sequence[Prompt]:
        """Prompts that a step starts once more: none."""
        return ()

    def capacity(self, step: int, groups: AsynchronousGroups, dropped: DroppedGroups) -> int:
        """Number of prompts that may be started now."""
        return self._bound.capacity(
            step,
            groups.num_started,
            num_in_flight=len(groups.started) - len(groups.ready),
            share=self._refill.share,
            num_more=self._refill.limit - dropped.num_refilled,
            num_beyond=self._refill.num_beyond,
        )

    def must_train(self, step: int, versions: Mapping[str, int]) -> frozenset[str]:
        """As of the bound."""
        return self._bound.must_train(step, versions)

    def select(self, step: int, versions: Mapping[str, int], ready: Sequence[str]) -> tuple[str, ...] | None:
        """As of the bound."""
        return self._bound.select(step, versions, ready)

    def missing(self, versions: Mapping[str, int], ready: Collection[str]) -> int:
        """As of the bound."""
        return self._bound.missing(versions, ready)

    def too_old(self, step: int, versions: Mapping[str, int]) -> tuple[str, ...]:
        """As of the bound."""
        return self._bound.too_old(step, versions)

    def end_step(
        self, step: int, groups: AsynchronousGroups, dropped: DroppedGroups, *, num_trained: int
    ) -> dict[str, float]:
        """The other groups go on in the next step; no metrics."""
        size, num_free = self._bound.groups_per_step, dropped.num_places - dropped.num_refilled
        self._refill.num_unfilled = max(0, num_free - (size - num_trained))
        groups.num_started = step * size + len(groups.started) + self._refill.num_unfilled
        return {}
