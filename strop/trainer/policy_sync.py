"""Generation at the policy's weights, which it shares with the actor: only their version is told.

Engines with weights of their own, which may be lost in the middle of a step, are in strop.rollout.replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.controller import WorkerGroup
from strop.workers.rollout import RolloutWorker

MAX_RECOVERIES = 3
"""Times that what was lost is played again: what ends so many engines is no accident."""


@dataclass(kw_only=True)
class WeightSync:
    """Brings generation to the actor's weights."""

    rollout: WorkerGroup[RolloutWorker]
    version: int
    """Policy version that the actor's weights held last time."""

    def start(self) -> None:
        """Bring engines with weights of their own to the actor's."""

    def update(self, version: int) -> None:
        """The actor's weights hold this policy version now: so does generation afterwards, verified.

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
