"""Settings of the end of a run and of fault tolerance."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check(config: Config) -> None:
    """Refuse a run that is to end by its validations, and has none.

    Raises:
        ValueError: the sentence says which setting, and what to do.
    """
    settings = config.trainer
    for key, value in (
        ("target_pass_rate", settings.target_pass_rate), ("patience", settings.patience)
    ):  # fmt: skip
        if value is not None and not (config.data.val_files and config.eval.every):
            lacking = "eval.every is 0" if config.data.val_files else "data.val_files is empty"
            raise ValueError(
                f"trainer.{key} is {value}, but {lacking}, so no validation can end the run: set it, or remove "
                f"trainer.{key}"
            )
