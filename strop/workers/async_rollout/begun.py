"""Groups that were begun for steps to come, and those of them that a step leaves out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from strop.protocol.trajectory import Prompt
from strop.trainer.rollout_batch import Experience
from strop.trainer.rounds.collector import SURPLUS
from strop.utils.metrics import Metric

AGE = Metric("training/off_policy/age_s/{mean,max}", "s", "from the begin of a sample's prompt to its step")


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The group of a prompt, in play or ended."""

    prompt: Prompt
    version: int
    """Of the policy when it was begun."""
    at_s: float
    """When, by the clock of this process."""


@dataclass
class LeftOut:
    """Groups that a step does not train on, so far."""

    causes: dict[str, str] = field(default_factory=dict)
    """By uid."""
    groups: list[Experience] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    num_before: int = 0
    """Groups that earlier steps left out, and whose places are free since."""
    num_replaced: int = 0
    """Of these and of those that cannot teach, in whose place others may be begun."""
    num_given_up: int = 0
    """Groups beside them that were given up before they had ended: surplus."""
    given_up_tokens: int = 0
    """That these had."""

    @property
    def num_places(self) -> int:
        """That groups which cannot teach have left free."""
        return self.num_before + sum(cause != SURPLUS for cause in self.causes.values())

    def add(self, one: Begun, group: Experience, cause: str) -> None:
        """Leave this group out."""
        self.causes[one.prompt.uid] = cause
        self.groups.append(group)
        self.begun.append(one)


def ages(begun: Sequence[Begun]) -> dict[str, float]:
    """AGE of the prompts of a step."""
    now = time.perf_counter()
    passed = [now - one.at_s for one in begun]
    return {AGE.of("mean"): sum(passed) / len(passed), AGE.of("max"): max(passed)} if passed else {}
