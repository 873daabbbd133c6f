"""Steps that start more prompts than they train, and do not wait for the slowest: rollout.over_issue.

The step takes the first data.prompts_per_step groups that complete. What becomes of the others is rollout.slowest:

    drop    they are not trained. Long answers are then rarer in training than in generation: a bias towards short ones;
    later   their prompts are set aside, and played afresh in a step of their own as soon as there are enough for one
            (tail batching, RollPacker, Gao et al. 2025). Every prompt is trained once, on samples of the policy that
            learns from them; long ones come later and together.

To keep what the slowest have so far and train it in the next step is rollout.max_staleness with a fraction.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from strop.data.visit_ids import parse_visit_uid
from strop.protocol.trajectory import Prompt
from strop.run import Fate, RunFolder
from strop.trainer.collectors.asynchronous import AsynchronousGroups
from strop.trainer.collectors.groups import DroppedGroups
from strop.trainer.config import Config
from strop.trainer.setup import TrainingData
from strop.utils.metrics import Metric

SLOWEST = "slowest of a step that began more than it trains"
"""Reason of a sample that is dropped."""
OVER_ISSUE = Metric(
    "training/over_issue/{dropped_prompts,waiting_prompts,discarded_tokens,is_long_round}",
    "prompts; tokens; 1",
    "with rollout.over_issue: prompts dropped in the step, and set aside so far; tokens that were generated for them "
    "in the step; whether it played what had been set aside",
)


class OverIssue:
    """A step takes the groups that complete first, and the others are dropped or set aside."""

    def __init__(self, config: Config, run: RunFolder, data: TrainingData) -> None:
        """Arguments are those of the run."""
        self._config, self._run, self._data = config, run, data
        self._size = config.data.prompts_per_step
        self._surplus = config.num_surplus_prompts
        self._sets_aside = config.rollout.slowest == "later"
        self._num_all = data.num_steps * self._size if self._sets_aside else math.inf
        self._set_aside: dict[str, Prompt] = {}  # by uid, in the order in which they were issued
        self._is_long_round = False

    def restore(self, checkpoint: Path | None, groups: AsynchronousGroups) -> list[str]:
        """The prompts without a fate are set aside; a sentence that says so."""
        for uid in groups.uids_in_ledger():
            self._set_aside[uid] = self._data.train.prompt(parse_visit_uid(uid)[1], uid)
        groups.num_started += len(self._set_aside)
        return [f"{len(self._set_aside)} prompts are set aside for a long round"] if self._set_aside else []

    def restart(self, step: int, groups: AsynchronousGroups) -> Sequence[Prompt]:
        """Prompts that a long round plays afresh, entered in `groups`; none in another step."""
        num_new = self._num_all - groups.num_started
        self._is_long_round = len(self._set_aside) >= self._size or (
            bool(self._set_aside) and num_new < self._size + self._surplus
        )
        if not self._is_long_round:
            return ()
        prompts = list(self._set_aside.values())[: self._size]
        for prompt in prompts:
            del self._set_aside[prompt.uid]
            groups.add(prompt, step - 1)
        groups.num_started -= len(prompts)  # they were counted before
        return prompts

    def capacity(self, step: int, groups: AsynchronousGroups, dropped: DroppedGroups) -> int:
        """Number of prompts that may be started now: a step with its surplus; a long round has none."""
        surplus = 0 if self._is_long_round else self._surplus
        in_steps = groups.num_started - len(self._set_aside)
        return int(max(0, min(step * self._size + surplus - in_steps, self._num_all - groups.num_started)))

    def must_train(self, step: int, versions: Mapping[str, int]) -> frozenset[str]:
        """None: a step waits for no certain group."""
        return frozenset()

    def select(self, step: int, versions: Mapping[str, int], ready: Sequence[str]) -> tuple[str, ...] | None:
        """The first that completed, in the order of their start; None while the step has to wait for more."""
        size = min(self._size, len(versions))
        return None if len(ready) < size else tuple(uid for uid in versions if uid in ready[:size])

    def missing(self, versions: Mapping[str, int], ready: Collection[str]) -> int:
        """Least number of further groups that must complete."""
        return max(0, min(self._size, len(versions)) - len(ready))

    def too_old(self, step: int, versions: Mapping[str, int]) -> tuple[str, ...]:
        """None: what becomes of those that a step did not wait for is a setting."""
        return ()

    def end_step(
        self, step: int, groups: AsynchronousGroups, dropped: DroppedGroups, *, num_trained: int
    ) -> dict[str, float]:
        """The groups that did not complete in time are dropped or set aside; OVER_ISSUE."""
        slowest = {uid: group.prompt for uid, group in groups.started.items()}
        discarded = groups.give_up(slowest)
        for table in (groups.started, groups.ready, groups.completed):
            table.clear()
        if self._sets_aside:
            waiting = self._set_aside | slowest
            self._set_aside = {uid: waiting[uid] for uid in groups.uids_in_ledger() if uid in waiting}
        else:
            samples = range(self._config.rollout.samples_per_prompt)
            fates = {f"{uid}/{i}": Fate("filtered", SLOWEST) for uid in slowest for i in samples}
            self._run.ledger.settle(step, fates)
        # As of a run that goes on from here: a step that trained fewer has no more room in the next one.
        groups.num_started = step * self._size + len(self._set_aside)
        return {
            OVER_ISSUE.of("dropped_prompts"): 0.0 if self._sets_aside else float(len(slowest)),
            OVER_ISSUE.of("waiting_prompts"): float(len(self._set_aside)),
            OVER_ISSUE.of("discarded_tokens"): float(discarded),
            OVER_ISSUE.of("is_long_round"): float(self._is_long_round),
        }
