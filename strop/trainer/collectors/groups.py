"""Groups of steps to come, and those of them that a step drops. A group is the samples of one prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from strop.protocol.trajectory import Prompt
from strop.trainer.collectors.dynamic_sampling import SURPLUS
from strop.trainer.rollout_batch import RolloutBatch
from strop.utils.metrics import Metric

AGE = Metric("training/off_policy/age_s/{mean,max}", "s", "from the begin of a sample's prompt to its step")


@dataclass(frozen=True, kw_only=True)
class InFlightGroup:
    """The group of a prompt that was started and is in no step yet."""

    prompt: Prompt
    version: int
    """Policy version when it was started."""
    started_s: float
    """Time of its start, by the clock of this process."""


@dataclass
class DroppedGroups:
    """Groups that a step does not train on, so far."""

    reasons: dict[str, str] = field(default_factory=dict)
    """Groups by uid."""
    episodes: list[RolloutBatch] = field(default_factory=list)
    started: list[InFlightGroup] = field(default_factory=list)
    num_before: int = 0
    """Groups that earlier steps dropped, and whose places are free since."""
    num_refilled: int = 0
    """Of these and of those that cannot teach, in whose place others may be started."""
    num_given_up: int = 0
    """Groups beside them that were given up in flight: surplus."""
    given_up_tokens: int = 0
    """Tokens of these."""

    @property
    def num_places(self) -> int:
        """Places that groups which cannot teach have left free."""
        return self.num_before + sum(reason != SURPLUS for reason in self.reasons.values())

    def add(self, group: InFlightGroup, episodes: RolloutBatch, reason: str) -> None:
        """Drop this group."""
        self.reasons[group.prompt.uid] = reason
        self.episodes.append(episodes)
        self.started.append(group)


def ages(groups: Sequence[InFlightGroup]) -> dict[str, float]:
    """AGE of the prompts of a step."""
    now = time.perf_counter()
    passed = [now - group.started_s for group in groups]
    return {AGE.of("mean"): sum(passed) / len(passed), AGE.of("max"): max(passed)} if passed else {}
