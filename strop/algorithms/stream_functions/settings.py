"""What a user sets about a function of his own that changes rewards, and whether it is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.algorithms.registry import REWARD_SHAPINGS, check_settings
from strop.base.sections import section_of

if TYPE_CHECKING:
    from strop.trainer.config import Config


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
    """Refuse a function that there is not, or settings that it has not.

    Raises:
        ValueError: the sentence says which.
    """
    settings = section_of(config.algorithm, ShapingSettings)
    if shaping := settings.reward_shaping:
        declaration = REWARD_SHAPINGS.declaration(shaping)
        check_settings(REWARD_SHAPINGS.kind, shaping, declaration, settings.shaping_settings)
