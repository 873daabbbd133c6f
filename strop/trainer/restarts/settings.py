"""What a user sets about the end of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.base.field_types import PositiveFloat, PositiveInt, PositiveShare
from strop.base.sections import section_of

if TYPE_CHECKING:
    from strop.trainer.config import Config


@dataclass(frozen=True, kw_only=True)
class EndingSettings:
    """Settings of the section trainer."""

    max_hours: PositiveFloat | None = None
    """End after this much training time, all continuations together, with a last validation and checkpoint."""
    target_pass_rate: PositiveShare | None = None
    """End at the first validation that reaches this pass rate."""
    patience: PositiveInt | None = None
    """End when so many validations in a row were no better than the best one before them."""


def check(config: Config) -> None:
    """Refuse a run that is to end by its validations, and has none.

    Raises:
        ValueError: the sentence says which setting, and what to do.
    """
    settings = section_of(config.trainer, EndingSettings)
    for key, value in (
        ("target_pass_rate", settings.target_pass_rate), ("patience", settings.patience)
    ):  # fmt: skip
        if value is not None and not (config.data.val_files and config.eval.every):
            lacking = "eval.every is 0" if config.data.val_files else "data.val_files is empty"
            raise ValueError(
                f"trainer.{key} is {value}, but {lacking}, so no validation can end the run: set it, or remove "
                f"trainer.{key}"
            )
