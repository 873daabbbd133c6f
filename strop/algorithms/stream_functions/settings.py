"""What a user sets about rewards that are changed: the penalty on long responses, and a function of his own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from strop.algorithms.registry import REWARD_SHAPINGS, check_settings
from strop.base.field_types import NonNegativeFloat, NonNegativeInt
from strop.base.sections import section_of

if TYPE_CHECKING:
    from strop.trainer.config import Config


@dataclass(frozen=True, kw_only=True)
class OverlongSettings:
    """Settings of the section reward."""

    overlong_buffer: Annotated[NonNegativeInt, "0 tokens are no penalty"] = 0
    """DAPO's soft penalty on long responses: it begins this many tokens below data.max_response_tokens; 0: none."""
    overlong_penalty: Annotated[NonNegativeFloat, "it is taken off the reward"] = 1.0
    """The full penalty, at the limit, in reward units."""

    def __post_init__(self) -> None:
        if self.overlong_penalty != 1.0 and self.overlong_buffer == 0:
            raise ValueError(
                f"reward.overlong_penalty is {self.overlong_penalty}, but reward.overlong_buffer is 0, so there is no "
                f"penalty: set the buffer to some tokens, or remove the penalty"
            )


@dataclass(frozen=True, kw_only=True)
class ShapingSettings:
    """Settings of the section algorithm."""

    reward_shaping: str = ""
    """A function of your own by its registered name (extensions) that changes the rewards of a prompt's samples
    before they are trained on, after reward.weight and reward.overlong_buffer; empty: none."""
    shaping_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of that function, by the names of its keyword arguments."""

    @property
    def has_known_names(self) -> bool:
        """The function is registered in this process."""
        return not self.reward_shaping or self.reward_shaping in REWARD_SHAPINGS

    def __post_init__(self) -> None:
        if self.shaping_settings and not self.reward_shaping:
            raise ValueError(
                f"algorithm.shaping_settings has {', '.join(self.shaping_settings)}, but algorithm.reward_shaping "
                f"names no function: name it, or remove them"
            )


def check(config: Config) -> None:
    """Refuse a function that there is not, settings that it has not, or a penalty on all responses.

    Raises:
        ValueError: the sentence says which.
    """
    buffer, limit = (
        section_of(config.reward, OverlongSettings).overlong_buffer,
        config.data.max_response_tokens,
    )
    if buffer > limit:
        raise ValueError(
            f"reward.overlong_buffer is {buffer}, but data.max_response_tokens is {limit}: the penalty begins that "
            f"many tokens below the limit, so set it to at most {limit}, or 0"
        )
    settings = section_of(config.algorithm, ShapingSettings)
    if shaping := settings.reward_shaping:
        declaration = REWARD_SHAPINGS.declaration(shaping)
        check_settings(REWARD_SHAPINGS.kind, shaping, declaration, settings.shaping_settings)
