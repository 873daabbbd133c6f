"""Rollout workers apart that are lost while a run goes on, and their replacements.

They hold nothing of the training: what one of them played is played again by the others, with the same keys. Another
process is started in its place at once, and joins the others between two steps, when it has come up: it gets the
weights of that step, the router, and its share of the prompts from then on. The last one cannot be done without: the
run begins again from its checkpoint (healing.py), as where they are lost too often.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from strop.rollout.routing.router import Router
from strop.utils.metrics import Metric
from strop.workers.rollout import RolloutSettings, RolloutWorker

if TYPE_CHECKING:
    from strop.controller.ray.elastic import ElasticGroup
    from strop.controller.ray.errors import RankLost
    from strop.controller.ray.group import RoleGroup
    from strop.trainer.config import Config

NUM_WORKERS = Metric(
    "rollout/num_workers", "processes", "that generate, where they can be lost and replaced one by one"
)
LOST, JOINED = "rollout_worker_lost", "rollout_worker_joined"
"""Kinds of events."""

logger = logging.getLogger(__name__)


def log_event(kind: str, step: int, message: str) -> None:
    """Observer of a caller that keeps no records of a run."""
    logger.warning("%s", message)


def are_replaced(config: Config, settings: RolloutSettings) -> bool:
    """True where the run goes on without rollout workers that are lost, and replaces them.

    There are several of them, in processes of their own. Not where each has a count of its own that the run needs: of
    the costs of reward services, or of the tokens that it has to sample of another run.
    """
    has_several = config.resources.runtime == "ray" and config.resources.apart.get("rollout", 0) > 1
    has_prices = any(service.has_price for service in config.reward.services.values())
    is_free = not settings.is_replayed and not has_prices
    return has_several and is_free and config.run.max_restarts > 0


class RolloutWorkers:
    """The rollout workers of a run, some of which may be lost."""

    def __init__(self, group: ElasticGroup[RolloutWorker], *, max_losses: int, step: int) -> None:
        """Args:
        group: of these workers.
        max_losses: times in a row that some may be lost in one step, and that a replacement may not come up.
        step: that was done last.
        """
        self.group = group
        """Group of the living ones."""
        self.observe: Callable[[str, int, str], object] = log_event
        """Takes the kind of an event, the step and a sentence."""
        self.router: Router | None = None
        """Router that replacements join."""
        self.num_lost = 0
        """Workers that were lost so far, as `note_losses` has told."""
        self._step, self._max_losses, self._size = step, max_losses, group.world_size
        self._num_losses = self._num_failed_starts = 0
        self._newcomers: list[RoleGroup[RolloutWorker]] = []

    def begin_step(self, step: int) -> None:
        """Begin a step, with no loss yet: the one before has ended in spite of its own."""
        self._step, self._num_losses = step, 0

    def metrics(self) -> dict[str, float]:
        """NUM_WORKERS."""
        return {NUM_WORKERS: float(self.group.world_size)}

    def note_losses(self) -> list[RankLost]:
        """Report the workers that were lost since the call before, which are given, and start others.

        Raises:
            WorkerLost: they were lost too often in this step.
        """
        losses = self.group.pop_losses()
        lost = [loss for loss in losses if not loss.was_starting]
        for loss in losses:
            if loss.was_starting:
                self._num_failed_starts += 1
                text = f"a rollout worker that was to replace another one did not start: {loss.failure.sentence()}"
                if self._num_failed_starts > self._max_losses:
                    text += f"; no other one is started, after {self._num_failed_starts} in a row"
            else:
                num_left = self.group.world_size
                text = f"{loss.failure.sentence()}; {num_left} of {self._size} rollout workers go on"
            self.observe(LOST, self._step, text)
        self.num_lost += len(lost)
        self._num_losses += bool(lost)
        if lost and self._num_losses > self._max_losses:
            raise lost[-1]
        if self._num_failed_starts <= self._max_losses:
            for rank in self.group.missing:
                self.group.start_replacement(rank)
        return lost

    def admit(self) -> None:
        """Between two steps: take in the replacements that have come up. They get weights next, then `join_router`.

        Raises:
            WorkerLost, WorkerFailed: as `note_losses`, or none is left.
        """
        self.group.check()
        newcomers = self.group.take_started()
        if newcomers is not None:  # before the losses are looked at: its rank is not missing any more
            self.group.add(newcomers)
            self._newcomers.append(newcomers)
        self.note_losses()

    def join_router(self) -> None:
        """Let the replacements that were taken in serve the others too, now that they hold the weights of the step."""
        while self._newcomers:
            newcomers = self._newcomers.pop()
            if self.router is not None:
                newcomers.call.join_router(self.router.address)
            self._num_failed_starts = 0
            where = ", ".join(f"rank {member.rank} ({member.where})" for member in newcomers.members)
            num, size = self.group.world_size, self._size
            self.observe(JOINED, self._step, f"{where} joins: {num} of {size} rollout workers")
