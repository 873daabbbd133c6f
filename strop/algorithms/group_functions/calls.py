"""Filters and reward shaping of a user's own, called; what comes back is checked, so an error names the function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.group_functions import SHAPING_COLUMNS, SampleGroup
from strop.algorithms.registry import FILTERS, REWARD_SHAPINGS
from strop.utils.registry import dotted


def filter_cause(name: str, group: SampleGroup) -> str:
    """Reason for which the filter leaves a group out; empty where it keeps it.

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
        f"filter {name!r}: {dotted(function)} returned {_describe(verdict)} for prompt {group.uid}, but a filter "
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
            f"reward shaping {name!r}: {dotted(function)} returned {_describe(result)} for prompt {group.uid}, but it "
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
