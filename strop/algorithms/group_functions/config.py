"""Checks of reward shaping: the penalty on long responses, and a function of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strop.algorithms.registry import REWARD_SHAPINGS, check_settings

if TYPE_CHECKING:
    from strop.algorithms.config import AlgorithmConfig


def check_overlong(penalty: float, buffer: int) -> None:
    """Refuse a penalty without a buffer, as a ValueError."""
    if penalty != 1.0 and buffer == 0:
        raise ValueError(
            f"reward.overlong_penalty is {penalty}, but reward.overlong_buffer is 0, so there is no "
            f"penalty: set the buffer to some tokens, or remove the penalty"
        )


def check_shaping(algorithm: AlgorithmConfig) -> None:
    """Refuse settings of a shaping function that is not named, as a ValueError."""
    if algorithm.shaping_settings and not algorithm.reward_shaping:
        raise ValueError(
            f"algorithm.shaping_settings has {', '.join(algorithm.shaping_settings)}, but algorithm.reward_shaping "
            f"names no function: name it, or remove them"
        )


def check_shaping_function(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse a function that there is not, or settings that it has not.

    Args:
        name: algorithm.reward_shaping; empty: no function.
        settings: algorithm.shaping_settings.

    Raises:
        ValueError: the sentence says which.
    """
    if name:
        declaration = REWARD_SHAPINGS.declaration(name)
        check_settings(REWARD_SHAPINGS.kind, name, declaration, settings, key="algorithm.shaping_settings")


def check_overlong_buffer(buffer: int, limit: int) -> None:
    """Refuse a penalty on all responses.

    Args:
        buffer: reward.overlong_buffer.
        limit: data.max_response_tokens.

    Raises:
        ValueError: the sentence says what to set.
    """
    if buffer > limit:
        raise ValueError(
            f"reward.overlong_buffer is {buffer}, but data.max_response_tokens is {limit}: the penalty begins that "
            f"many tokens below the limit, so set it to at most {limit}, or 0"
        )
