"""Functions of a user's own on the samples of a prompt: filters of dynamic sampling, and shaping of rewards.

calls.py    Filters and reward shaping of a user's own, called
config.py   Checks of reward shaping
shaping.py  Reward shaping

    filter:   keep(group) -> True, False, or a string: why the group is left out
    shaping:  shape(rewards, *, response_lengths, max_response_tokens, ..., own settings) -> rewards

Both are called once per prompt, with all its samples, so what they return depends on no cut of the batch. This module
needs no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from strop.algorithms.registry import FILTERS, REWARD_SHAPINGS
from strop.utils.registry import dotted, required_parameters


@dataclass(frozen=True, kw_only=True)
class SampleGroup:
    """The scored samples of one prompt, as a filter sees them; every tuple has one entry per sample."""

    uid: str
    """Of the prompt's visit."""
    data_source: str
    """Of the prompt."""
    rewards: tuple[float, ...]
    """Rewards of the scorer."""
    accuracies: tuple[float, ...]
    """The scorer's `acc`, else the reward."""
    parts: tuple[Mapping[str, float | str | bool], ...]
    """Further results of the scorer."""
    response_lengths: tuple[int, ...]
    """Tokens after the prompt."""
    num_turns: tuple[int, ...]
    """Generations."""
    stop_reasons: tuple[str, ...]
    """Stop reason of each sample: `length` at the limit."""


RewardShaping = Callable[..., object]

SHAPING_COLUMNS = (
    "rewards",
    "scores",
    "accuracies",
    "response_lengths",
    "num_turns",
    "stop_reasons",
    "parts",
    "data_source",
    "max_response_tokens",
)
"""Keyword arguments of a shaping function, where it has a parameter of the name."""

register_filter = FILTERS.register
"""Decorator: `@register_filter(name)`."""


def register_reward_shaping(name: str) -> Callable[[RewardShaping], RewardShaping]:
    """A decorator that makes a function available as algorithm.reward_shaping=name.

    Its parameters are any of `SHAPING_COLUMNS`, and settings of its own with a default
    (algorithm.shaping_settings):

        rewards              [K] float64, what the samples of a prompt would be trained with
        scores, accuracies   [K] float64, what the scorer gave: its score, and its `acc` or else the score
        response_lengths     [K] int64, tokens after the prompt
        num_turns            [K] int64, generations
        stop_reasons         K strings; `length` at the limit
        parts                K mappings, what else the scorer returned
        data_source          of the prompt
        max_response_tokens  the limit

    It returns the new rewards: a tensor [K], or K numbers.

    Raises:
        ValueError: the name is taken, or the function requires something that nobody gives it.
    """

    def add(function: RewardShaping) -> RewardShaping:
        unknown = [name for name in required_parameters(function) if name not in SHAPING_COLUMNS]
        if unknown:
            raise ValueError(
                f"reward shaping {name!r}: {dotted(function)} requires {', '.join(unknown)}, which nobody gives it; "
                f"there are {', '.join(SHAPING_COLUMNS)}, and settings have a default"
            )
        parameters = inspect.signature(function).parameters
        needs = [column for column in SHAPING_COLUMNS if column in parameters]
        return REWARD_SHAPINGS.register(name, needs=needs)(function)

    return add
