"""Functions of a user's own on the samples of a prompt: filters of dynamic sampling, and shaping of rewards.

    filter:   keep(group) -> True, False, or a string: why the group is left out
    shaping:  shape(rewards, *, response_lengths, max_response_tokens, ..., own settings) -> rewards

Both are called once per prompt, with all its samples, so what they return depends on no cut of the batch. What comes
back is checked here, so that an error names the function.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.registry import Registry, check_settings


@dataclass(frozen=True, kw_only=True)
class SampleGroup:
    """The scored samples of one prompt, as a filter sees them; every tuple has one entry per sample."""

    uid: str
    """Of the prompt's visit."""
    data_source: str
    """Of the prompt."""
    rewards: tuple[float, ...]
    """What the scorer gave."""
    accuracies: tuple[float, ...]
    """The scorer's `acc`, else the reward."""
    parts: tuple[Mapping[str, float | str | bool], ...]
    """What else the scorer returned."""
    response_lengths: tuple[int, ...]
    """Tokens after the prompt."""
    num_turns: tuple[int, ...]
    """Generations."""
    stop_reasons: tuple[str, ...]
    """Why each sample ended: `length` at the limit."""


GroupFilter = Callable[[SampleGroup], object]
RewardShaping = Callable[..., object]

FILTERS: Registry[GroupFilter] = Registry("filter", replaceable=False)
REWARD_SHAPINGS: Registry[RewardShaping] = Registry("reward shaping", replaceable=False)

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
"""What a shaping function is given, by keyword, where it has a parameter of the name."""

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
        parameters = inspect.signature(function).parameters
        unknown = [
            parameter.name
            for parameter in parameters.values()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            and parameter.name not in SHAPING_COLUMNS
        ]
        if unknown:
            raise ValueError(
                f"reward shaping {name!r}: {_name(function)} requires {', '.join(unknown)}, which nobody gives it; "
                f"there are {', '.join(SHAPING_COLUMNS)}, and settings have a default"
            )
        needs = [column for column in SHAPING_COLUMNS if column in parameters]
        return REWARD_SHAPINGS.register(name, needs=needs)(function)

    return add


def check_shaping(name: str, settings: Mapping[str, object]) -> None:
    """Refuse settings that the function does not have.

    Raises:
        ValueError: there is no such function, or no such setting.
    """
    function = REWARD_SHAPINGS[name]
    check_settings("reward shaping", name, function, REWARD_SHAPINGS.declaration(name), settings)


def filter_cause(name: str, group: SampleGroup) -> str:
    """Why the filter leaves a group out; empty where it keeps it.

    Raises:
        ValueError: it returned something else than True, False or a reason.
    """
    function = FILTERS[name]
    verdict = function(group)
    if isinstance(verdict, bool | np.bool_):
        return "" if verdict else f"filter {name}"
    if isinstance(verdict, str) and verdict.strip():
        return verdict.strip()
    raise ValueError(
        f"filter {name!r}: {_name(function)} returned {_describe(verdict)} for prompt {group.uid}, but a filter "
        f"returns True to keep the group, False, or a string that says why it is left out"
    )


def shaped_rewards(
    name: str,
    group: SampleGroup,
    rewards: Sequence[float],
    *,
    max_response_tokens: int,
    settings: Mapping[str, object],
) -> list[float]:
    """The rewards of a prompt's samples after shaping.

    Args:
        name: of the function.
        group: the samples.
        rewards: what they would be trained with.
        max_response_tokens: the limit of a response.
        settings: algorithm.shaping_settings.

    Raises:
        ValueError: the function returned something else than one finite number per sample.
    """
    function = REWARD_SHAPINGS[name]
    offered: dict[str, object] = {
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "scores": torch.tensor(group.rewards, dtype=torch.float64),
        "accuracies": torch.tensor(group.accuracies, dtype=torch.float64),
        "response_lengths": torch.tensor(group.response_lengths, dtype=torch.int64),
        "num_turns": torch.tensor(group.num_turns, dtype=torch.int64),
        "stop_reasons": group.stop_reasons,
        "parts": group.parts,
        "data_source": group.data_source,
        "max_response_tokens": max_response_tokens,
    }
    needs = REWARD_SHAPINGS.declaration(name).needs
    with torch.no_grad():
        result = function(**{key: offered[key] for key in SHAPING_COLUMNS if key in needs}, **settings)
    numbers = _numbers(result)
    if numbers is None or len(numbers) != len(rewards) or not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"reward shaping {name!r}: {_name(function)} returned {_describe(result)} for prompt {group.uid}, but it "
            f"returns the rewards of the prompt's {len(rewards)} samples, a finite number each"
        )
    return numbers


def _numbers(result: object) -> list[float] | None:
    if isinstance(result, Tensor | np.ndarray):
        return [float(value) for value in result.tolist()] if result.ndim == 1 else None
    if isinstance(result, Sequence) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in result
    ):
        return [float(value) for value in result]
    return None


def _describe(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        finite = "" if np.isfinite(np.asarray(value)).all() else " with values that are not finite"
        return f"a {type(value).__name__} of shape {list(value.shape)}{finite}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:60] if value is None or isinstance(value, str) else f"a {type(value).__name__}"


def _name(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"
