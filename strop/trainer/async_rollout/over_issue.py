"""Steps that begin more prompts than they train, and do not wait for the slowest: rollout.over_issue.

The step takes the first data.prompts_per_step groups that end. What becomes of the others is rollout.slowest:

    drop    they are not trained. Long answers are then rarer in training than in generation: a bias towards short ones;
    later   their prompts are set aside, and played afresh in a step of their own as soon as there are enough for one
            (tail batching, RollPacker, Gao et al. 2025). Every prompt is trained once, on samples of the policy that
            learns from them; long ones come later and together.

To keep what the slowest have so far and train it in the next step is rollout.max_staleness with a fraction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.controller import as_list
from strop.data.sampler import parse_visit_uid
from strop.protocol.trajectory import Prompt
from strop.run import Fate
from strop.trainer.async_rollout.calls import calls
from strop.trainer.async_rollout.collector import AheadCollector
from strop.trainer.async_rollout.pacing import Pace
from strop.utils.metrics import Metric
from strop.workers.async_rollout.begun import LeftOut

SLOWEST = "slowest of a step that began more than it trains"
"""Why a sample is left out."""
OVER_ISSUE = Metric(
    "training/over_issue/{dropped_prompts,waiting_prompts,discarded_tokens,is_long_round}",
    "prompts; tokens; 1",
    "with rollout.over_issue: prompts dropped in the step, and set aside so far; tokens that were generated for them "
    "in the step; whether it played what had been set aside",
)


class FirstToEnd(Pace):
    """Which groups such a step takes."""

    def due(self, step: int, begun: Mapping[str, int]) -> frozenset[str]:
        """None: a step waits for no certain group."""
        return frozenset()

    def surplus(self, step: int, left: Mapping[str, int]) -> tuple[str, ...]:
        """None: what becomes of those that a step did not wait for is a setting."""
        return ()

    def choose(self, step: int, begun: Mapping[str, int], finished: Sequence[str]) -> tuple[str, ...] | None:
        """The first that finished, in the order in which they were begun; None while it has to wait for more."""
        size = min(self.groups_per_step, len(begun))
        if len(finished) < size:
            return None
        return tuple(uid for uid in begun if uid in finished[:size])


class OverIssueCollector(AheadCollector):
    """Fills steps with the groups that end first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As AheadCollector."""
        super().__init__(*args, **kwargs)
        self._size, num_steps = self._pace.groups_per_step, self._pace.num_steps
        self._pace = FirstToEnd(groups_per_step=self._size, max_staleness=0.0, num_steps=num_steps)
        self._keeps = self._config.rollout.slowest == "later"
        self._num_all = num_steps * self._size if self._keeps else math.inf
        self._aside: dict[str, Prompt] = {}
        """By uid, in the order in which they were issued, those that wait for a long round."""
        self._is_long = False

    def _go_on(self, checkpoint: Path | None) -> list[str]:
        """What was set aside still is."""
        for uid in dict.fromkeys(name.rpartition("/")[0] for name in self._run.ledger.in_flight()):
            self._aside[uid] = self._data.train.prompt(parse_visit_uid(uid)[1], uid)
        self._num_begun += len(self._aside)
        return [f"{len(self._aside)} prompts are set aside for a long round"] if self._aside else []

    def _open(self, step: int, left_out: LeftOut) -> int:
        """Begin the prompts of a step, with a surplus; or what was set aside, without one."""
        surplus = math.ceil(self._config.rollout.over_issue * self._size)
        num_new = self._num_all - self._num_begun
        self._is_long = len(self._aside) >= self._size or (
            bool(self._aside) and num_new < self._size + surplus
        )
        if self._is_long:
            again = list(self._aside.values())[: self._size]
            for prompt in again:
                del self._aside[prompt.uid]
                self._note(prompt, step - 1)
            self._num_begun -= len(again)  # they were counted before
            self._begin(self._in_order(again))
        return self._fill(step, left_out)

    def _room(self, step: int, left_out: LeftOut) -> int:
        surplus = 0 if self._is_long else math.ceil(self._config.rollout.over_issue * self._size)
        in_steps = self._num_begun - len(self._aside)
        return int(max(0, min(step * self._size + surplus - in_steps, self._num_all - self._num_begun)))

    def _give_up(self, step: int, left_out: LeftOut, *, num_trained: int) -> dict[str, float]:
        """The groups that did not end in time are dropped or set aside."""
        slowest = {uid: one.prompt for uid, one in self._begun.items()}
        discarded = sum(as_list(calls(self._roles).drop(list(slowest)))) if slowest else 0
        for known in (self._begun, self._ended, self._arrived):
            known.clear()
        if self._keeps:
            either = self._aside | slowest
            issued = dict.fromkeys(name.rpartition("/")[0] for name in self._run.ledger.in_flight())
            self._aside = {uid: either[uid] for uid in issued if uid in either}
        else:
            self._num_begun -= len(slowest)
            samples = range(self._config.rollout.samples_per_prompt)
            fates = {f"{uid}/{i}": Fate("filtered", SLOWEST) for uid in slowest for i in samples}
            self._run.ledger.settle(step, fates)
        return {
            OVER_ISSUE.of("dropped_prompts"): 0.0 if self._keeps else float(len(slowest)),
            OVER_ISSUE.of("waiting_prompts"): float(len(self._aside)),
            OVER_ISSUE.of("discarded_tokens"): float(discarded),
            OVER_ISSUE.of("is_long_round"): float(self._is_long),
        }
