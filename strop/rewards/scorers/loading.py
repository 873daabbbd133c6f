"""The built-in scorers as a reward function of a worker process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.rewards.functions import RewardFunction
from strop.rewards.scorers.dispatch import default_compute_score, has_scorer, prepare


@dataclass(frozen=True, kw_only=True)
class BuiltInScorer(RewardFunction):
    """The scorer that belongs to the data source of each row."""

    is_left_out: bool = False
    """A reward model alone rewards, so that rows without a right answer, or of a source without a scorer, have 0."""

    def prepare(self, data_source: str) -> None:
        """Import and start what its scorer needs."""
        if not self.is_left_out or has_scorer(data_source):
            prepare(data_source)

    def __call__(self, call: Mapping[str, Any]) -> Any:
        """The score of one call."""
        if self.is_left_out and (call["ground_truth"] in (None, "") or not has_scorer(call["data_source"])):
            return {"score": 0.0}
        return super().__call__(call)


def load_built_in(setup: Mapping[str, Any]) -> RewardFunction:
    """The built-in scorers as a reward function, with kwargs, key and weight of its setup."""
    return BuiltInScorer(
        function=default_compute_score, label="the built-in scorer",
        kwargs=setup["kwargs"], key=setup["key"], weight=setup["weight"],
        is_left_out=setup.get("is_left_out", False),
    )  # fmt: skip
