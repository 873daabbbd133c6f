"""Groups that cannot teach, and those that are begun in their place: algorithm.filter_groups without rounds.

So many groups are in flight that a step gets what it needs, by the share of groups that could teach lately
(`StalenessBound.capacity`). The share follows from the groups that steps have looked at, in that order, and is part of
a checkpoint, so that a run that is resumed or made again starts the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from strop.algorithms.dynamic_sampling_config import FilterGroupsConfig
from strop.trainer.collectors.dynamic_sampling import LOWEST_RATE
from strop.trainer.collectors.saved_state import restore_state

FILE = "teaching_share.json"
_KEPT = 0.5
"""Weight of a step's groups in the next step, as a share of their weight in their own: policies change."""


class Refill:
    """Number of groups to start for those that cannot teach."""

    def __init__(self, settings: FilterGroupsConfig, groups_per_step: int) -> None:
        """Args:
        settings: of the filter; without one all groups can teach.
        groups_per_step: that a step trains.
        """
        at_once = settings.prompts_per_round or groups_per_step
        self.limit = max(0, settings.max_rounds * at_once - groups_per_step)
        """Groups that may be left out before one step, and replaced."""
        self.num_beyond = at_once - groups_per_step
        """Groups that may be in play beside those without a filter; below 0: fewer."""
        self._at_first = min(1.0, groups_per_step / at_once)
        self._num_seen, self._num_teaching = 0.0, 0.0
        self.num_unfilled = 0
        """Places of the lead that groups left free when a step had come to its limit."""

    @property
    def share(self) -> float:
        """Of groups that is expected to teach."""
        if not self._num_seen:
            return self._at_first
        return max(self._num_teaching / self._num_seen, LOWEST_RATE)

    def record(self, teaches: bool) -> None:
        """A step has looked at a group."""
        self._num_seen += 1
        self._num_teaching += teaches

    def end_step(self) -> None:
        """Let the counts until now weigh less from now on."""
        self._num_seen *= _KEPT
        self._num_teaching *= _KEPT

    def state(self) -> str:
        """For a checkpoint."""
        counts = {"seen": self._num_seen, "teaching": self._num_teaching, "unreplaced": self.num_unfilled}
        return json.dumps(counts)

    def restore(self, file: Path) -> None:
        """Restore the state of a checkpoint; as `restore_state`."""
        restore_state(file, self._take)

    def _take(self, counts: Mapping[str, float]) -> None:
        self._num_seen, self._num_teaching = float(counts["seen"]), float(counts["teaching"])
        self.num_unfilled = int(counts["unreplaced"])
