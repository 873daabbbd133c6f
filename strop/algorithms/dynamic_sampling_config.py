"""Settings of dynamic sampling."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from strop.algorithms.registry import FILTERS
from strop.config.sections import section
from strop.utils.field_types import NonNegativeInt, PositiveInt


@section("algorithm.filter_groups")
class FilterGroupsConfig:
    """DAPO's dynamic sampling: ask for prompts until enough groups of samples can teach."""

    enable: bool = False
    """Leave out groups whose samples all got the same, and sample others in their place."""
    metric: Literal["score", "acc"] = "acc"
    """Quantity that is compared within a group: the score, or the scorer's `acc` where it gives one."""
    lowest_mean: float | None = None
    """Leave out groups with a mean below this too: harder than the band of difficulty."""
    highest_mean: float | None = None
    """Leave out groups with a mean above this too: easier than the band."""
    filter: str = ""
    """A filter of your own (extensions) or of an installed package (docs/packages.md) by its name, which judges the
    groups that these rules leave; empty: none."""
    prompts_per_round: PositiveInt | None = None
    """Prompts of each round of sampling, for example three times data.prompts_per_step, so that one round is enough;
    groups beyond those that are wanted are left out. null: data.prompts_per_step, and in later rounds what is missing
    by the share of groups that taught so far. Where generation is ahead of training there are no rounds: so many are in
    play of each step at most."""
    max_rounds: PositiveInt = 10
    """Rounds of sampling in one step; where generation is ahead, of so many prompts as they would have."""
    at_limit: Literal["train", "stop"] = "train"
    """After the last round with too few groups: train on those there are, or end the run."""
    retire_solved: bool = False
    """Do not visit a prompt again once every sample of a group solved it."""
    defer_failed: Annotated[NonNegativeInt, "0 is not at all"] = 0
    """Epochs for which a prompt rests after no sample solved it."""

    @property
    def is_on(self) -> bool:
        """Groups may be left out."""
        return self.enable

    @property
    def has_known_names(self) -> bool:
        """The filter is registered in this process."""
        return not self.filter or self.filter in FILTERS

    def __post_init__(self) -> None:
        key = "algorithm.filter_groups"
        low, high = self.lowest_mean, self.highest_mean
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"{key}.lowest_mean is {low}, above highest_mean, which is {high}: no group is between"
            )
        changed = [setting.name for setting in fields(self) if getattr(self, setting.name) != setting.default]
        if changed and not self.enable:
            raise ValueError(
                f"{key}.{changed[0]} is set, but {key}.enable is false: set that to true, or remove it"
            )
