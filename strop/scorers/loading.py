"""The built-in scorers in a worker process of the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.rewards.functions import RewardFunction
from strop.scorers.dispatch import default_compute_score, prepare


@dataclass(frozen=True, kw_only=True)
class BuiltInScorer(RewardFunction):
    """The scorer that belongs to the data source of each row."""

    def prepare(self, data_source: str) -> None:
        """Import and start what its scorer needs."""
        prepare(data_source)


def load_built_in(setup: Mapping[str, Any]) -> RewardFunction:
    """The built-in scorers as a reward function, with kwargs, key and weight of its setup."""
    return BuiltInScorer(
        function=default_compute_score, label="the built-in scorer", style="verl",
        kwargs=setup["kwargs"], key=setup["key"], weight=setup["weight"],
    )  # fmt: skip
