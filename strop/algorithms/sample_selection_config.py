"""Settings of the selection of samples to train on: drawn by their scores, or the best ones kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.sections import section
from strop.utils.field_types import FiniteFloat, PositiveInt

if TYPE_CHECKING:
    from strop.algorithms.config import AlgorithmConfig


@section("algorithm.keep")
class KeepConfig:
    """Rejection sampling: which samples are trained on at all. Off by default: all are."""

    best: PositiveInt | None = None
    """At most so many samples of each prompt: those with the largest scores, of equal ones the first. null: all."""
    min_score: FiniteFloat | None = None
    """Samples with at least this score. null: any. Rewards of right and wrong need it: without, the best of a prompt
    that no sample solved is a wrong one."""

    @property
    def is_on(self) -> bool:
        """Some samples may be left out."""
        return self.best is not None or self.min_score is not None


def check_choice(algorithm: AlgorithmConfig) -> None:
    """Refuse settings of a choice of samples that do not go together, as a ValueError."""
    if algorithm.resampling != "pow" and algorithm.resampling_power != 2.0:
        raise ValueError(
            f"algorithm.resampling_power is {algorithm.resampling_power}, but algorithm.resampling="
            f"{algorithm.resampling} takes no power: set algorithm.resampling=pow, or remove it"
        )
    if algorithm.resampling == "none" and algorithm.resampling_within != "batch":
        raise ValueError(
            f"algorithm.resampling_within is {algorithm.resampling_within}, but algorithm.resampling=none draws "
            f"nothing: choose a resampling, or remove it"
        )
    if algorithm.keep.is_on and algorithm.resampling != "none":
        raise ValueError(
            f"algorithm.keep and algorithm.resampling={algorithm.resampling} both choose the samples that are trained "
            f"on: remove one of the two"
        )
