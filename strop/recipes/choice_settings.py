"""What a user sets about the samples that are trained on: some drawn by their scores, or the best ones kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from strop.base.field_types import FiniteFloat, NonNegativeFloat, PositiveInt
from strop.base.sections import section


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


@dataclass(frozen=True, kw_only=True)
class ChoiceSettings:
    """Settings of the section algorithm."""

    resampling: Literal["none", "pow", "max_min", "max_random"] = "none"
    """PF-PPO: train on as many samples as there are, drawn with replacement by their scores. pow: in proportion to
    |score|^resampling_power. max_min: the largest and the smallest score alone. max_random: the largest score with
    weight 0.4, every other with 0.1. none: each sample once."""
    resampling_power: NonNegativeFloat = 2.0
    """Exponent of resampling=pow."""
    resampling_within: Literal["batch", "prompt"] = "batch"
    """What scores are compared with and drawn from: all samples of the step, or those of the same prompt."""

    @property
    def chooses_samples(self: Any) -> bool:
        """Some samples may not be trained on, or several times."""
        chooses: bool = self.resampling != "none" or self.keep.is_on
        return chooses

    def __post_init__(self: Any) -> None:
        if self.resampling != "pow" and self.resampling_power != 2.0:
            raise ValueError(
                f"algorithm.resampling_power is {self.resampling_power}, but algorithm.resampling="
                f"{self.resampling} takes no power: set algorithm.resampling=pow, or remove it"
            )
        if self.resampling == "none" and self.resampling_within != "batch":
            raise ValueError(
                f"algorithm.resampling_within is {self.resampling_within}, but algorithm.resampling=none draws "
                f"nothing: choose a resampling, or remove it"
            )
        if self.keep.is_on and self.resampling != "none":
            raise ValueError(
                f"algorithm.keep and algorithm.resampling={self.resampling} both choose the samples that are trained "
                f"on: remove one of the two"
            )
