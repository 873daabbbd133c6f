"""Validations of a run compared with each other, for its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def ranks_of(validations: Sequence[Mapping[str, Any]]) -> tuple[list[float], bool]:
    """The numbers by which these validations are compared, and whether they are pass rates: where one of them has none,
    all are compared by their mean rewards."""
    rates = [event.get("pass_rate") for event in validations]
    if all(rate is not None for rate in rates):
        return [float(rate) for rate in rates if rate is not None], True
    rewards = [event.get("reward") for event in validations]
    return [-math.inf if reward is None else float(reward) for reward in rewards], False


def has_stalled(numbers: Sequence[float], patience: int) -> bool:
    """True when none of the last `patience` validations was better than the best one before them."""
    return len(numbers) > patience and max(numbers[-patience:]) <= max(numbers[:-patience])
