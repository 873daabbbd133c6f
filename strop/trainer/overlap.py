"""Columns of samples that are made while other samples are generated: rollout.overlap_log_probs.

What models say of a row (log-probs of policy and reference, values, a reward model's score) depends on no other row, so
it need not wait for the rest of the step. Each group is computed by itself, so that its numbers depend on nothing but
the group and the weights: a run that is resumed or made again has the same ones, whatever ended first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from strop.rollout.types import Sampling
from strop.trainer.collecting import training_rows
from strop.trainer.config import Config
from strop.trainer.experience import Experience
from strop.trainer.phases import Stages
from strop.trainer.producers import StepContext, produced, wanted_of_groups
from strop.trainer.roles import Roles


class GroupColumns:
    """The training rows of the groups of one step, with what models say of them."""

    def __init__(self, config: Config, roles: Roles, sampling: Sampling) -> None:
        self._config, self._roles, self._sampling = config, roles, sampling
        self._wanted = wanted_of_groups(config)
        self._made: dict[str, Experience] = {}
        self.busy_s = 0.0
        """Seconds that making them took, in all."""

    def make(self, uid: str, group: Experience, stages: Stages) -> None:
        """Make those of this group, with the weights of the moment."""
        begun = time.perf_counter()
        rows = training_rows(self._config, self._roles, group, self._sampling)
        if len(rows):  # none, where every sample failed
            rows = produced(rows, self._wanted, StepContext(self._config, self._roles), stages)
        self._made[uid] = rows
        self.busy_s += time.perf_counter() - begun

    def take(self, uids: Sequence[str]) -> Experience:
        """Those of these groups, one after another. All others are forgotten: the next step has other weights."""
        parts = [self._made[uid] for uid in uids]
        self._made.clear()
        return Experience.concat([part for part in parts if len(part)] or parts[:1])
