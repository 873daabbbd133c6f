"""Weight sync where generation shares the actor's weights: only their version is set.

Engines with weights of their own, which may be lost in the middle of a step, have that of remote_weight_sync.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.controller import WorkerGroup
from strop.workers.rollout import RolloutWorker

MAX_RECOVERIES = 3
"""Recoveries from lost engines per rollout call; more of them are no accident."""


@dataclass(kw_only=True)
class WeightSync:
    """Weight sync from the actor to generation."""

    rollout: WorkerGroup[RolloutWorker]
    version: int
    """Policy version of the last update."""

    def start(self) -> None:
        """Nothing to do: the actor's weights are those of generation."""

    def update(self, version: int) -> None:
        """Bring generation to the actor's weights, which hold this policy version now, verified.

        Raises:
            SyncError, WorkerFailed: an engine could not be brought to it.
        """
        self.version = version
        self.rollout.call.set_version(version)

    def recover(self) -> bool:
        """Start engines again that do not serve, with the current weights; False where all of them do.

        Raises:
            SyncError, WorkerFailed: as `update`.
        """
        return False

    def metrics(self) -> dict[str, float]:
        """Metrics of the last update."""
        return {}
