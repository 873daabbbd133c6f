"""Checks of reward shaping: the penalty on long responses, and a function of the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.algorithms.registry import REWARD_SHAPINGS, check_settings

if TYPE_CHECKING:
    from strop.algorithms.config import AlgorithmConfig
    from strop.trainer.config import Config


def check_overlong(reward: Any) -> None:
    """Refuse a penalty without a buffer, as a ValueError."""
    if reward.overlong_penalty != 1.0 and reward.overlong_buffer == 0:
        raise ValueError(
            f"reward.overlong_penalty is {reward.overlong_penalty}, but reward.overlong_buffer is 0, so there is no "
            f"penalty: set the buffer to some tokens, or remove the penalty"
        )


def check_shaping(algorithm: AlgorithmConfig) -> None:
    """Refuse settings of a shaping function that is not named, as a ValueError."""
    if algorithm.shaping_settings and not algorithm.reward_shaping:
        raise ValueError(
            f"algorithm.shaping_settings has {', '.join(algorithm.shaping_settings)}, but algorithm.reward_shaping "
            f"names no function: name it, or remove them"
        )


def check(config: Config) -> None:
    """Refuse a function that there is not, settings that it has not, or a penalty on all responses.

    Raises:
        ValueError: the sentence says which.
    """
    buffer, limit = (
        config.reward.overlong_buffer,
        config.data.max_response_tokens,
    )
    if buffer > limit:
        raise ValueError(
            f"reward.overlong_buffer is {buffer}, but data.max_response_tokens is {limit}: the penalty begins that "
            f"many tokens below the limit, so set it to at most {limit}, or 0"
        )
    settings = config.algorithm
    if shaping := settings.reward_shaping:
        declaration = REWARD_SHAPINGS.declaration(shaping)
        check_settings(REWARD_SHAPINGS.kind, shaping, declaration, settings.shaping_settings)
