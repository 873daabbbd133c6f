"""Columns of samples that are made while other samples are generated: rollout.overlap_log_probs.

What models say of a row (log-probs of policy and reference, values, a reward model's score) depends on no other row, so
it need not wait for the rest of the step. Groups that have ended are gathered until they are worth a pass: a quarter of
a step, or as many tokens as all ranks take in one forward pass. What is left is made when the step has its groups.
Which groups share a pass follows from their order alone, not from when they came: a run that is resumed or made again
has the same passes, and so the same numbers to the bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from strop.rollout.types import Sampling
from strop.trainer.collecting import training_rows
from strop.trainer.config import Config
from strop.trainer.producers import StepContext, produced, wanted_of_groups
from strop.trainer.rollout_batch import Experience
from strop.trainer.timing import Stages
from strop.trainer.worker_groups import Roles

_PASSES = 4
"""Of a step, where it has fewer tokens than would fill them: the last one is what generation cannot hide."""


class GroupColumns:
    """The training rows of the groups of one step, with what models say of them."""

    def __init__(self, config: Config, roles: Roles, sampling: Sampling) -> None:
        self._config, self._roles, self._sampling = config, roles, sampling
        self._wanted = wanted_of_groups(config)
        self._max_groups = math.ceil(config.data.prompts_per_step / _PASSES)
        self._max_tokens = config.actor.engine.max_tokens_per_device * roles.actor.mesh.dp
        self._made: dict[str, Experience] = {}
        self._worked_s = 0.0

    def make_full(self, ended: Mapping[str, Experience], stages: Stages) -> None:
        """Make the columns of groups that fill a pass, with the weights of the moment.

        Args:
            ended: by uid, groups that may be wanted, first the one that a step looked at first.
            stages: of the step.
        """
        gathered: dict[str, Experience] = {}
        num_tokens = 0
        for uid, group in ended.items():
            if uid in self._made:
                continue
            gathered[uid] = group
            num_tokens += sum(report.num_tokens for report in group.reports)
            if len(gathered) >= self._max_groups or num_tokens >= self._max_tokens:
                self._make(gathered, stages)
                gathered, num_tokens = {}, 0

    def take(self, groups: Mapping[str, Experience], stages: Stages) -> Experience:
        """Those of these groups, one after another. All others are forgotten: the next step has other weights."""
        left = {uid: group for uid, group in groups.items() if uid not in self._made}
        if left:
            self._make(left, stages)
        parts = [self._made[uid] for uid in groups]
        self._made.clear()
        self._worked_s = 0.0
        return Experience.concat([part for part in parts if len(part)] or parts[:1])

    def worked_s(self) -> float:
        """Seconds that making them took, since the last `take`."""
        return self._worked_s

    def _make(self, groups: Mapping[str, Experience], stages: Stages) -> None:
        """The columns of these, in one pass."""
        begun = time.perf_counter()
        episodes = Experience.concat(list(groups.values()))
        rows = training_rows(self._config, self._roles, episodes, self._sampling)
        if len(rows):  # none, where every sample failed
            rows = produced(rows, self._wanted, StepContext(self._config, self._roles), stages)
        own: dict[str, list[int]] = {uid: [] for uid in groups}
        for row, report in enumerate(rows.reports):
            own[report.uid].append(row)
        self._made |= {uid: rows.take(numbers) for uid, numbers in own.items()}
        self._worked_s += time.perf_counter() - begun


def describe_overlap(config: Config) -> list[str]:
    """Where rollout.overlap_log_probs hides nothing, a line that says so."""
    if not config.rollout.overlap_log_probs or "rollout" in config.resources.apart:
        return []
    line = (
        "overlap: generation has no processes of its own, so it stands still while models look at its samples, and "
        "rollout.overlap_log_probs gains nothing; it does with resources.apart={rollout: 1} on Ray"
    )
    return [line]
