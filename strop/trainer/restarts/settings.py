"""What a user sets about the end of a run, and about what it outlives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from strop.base.field_types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare
from strop.base.sections import section_of

if TYPE_CHECKING:
    from strop.trainer.config import Config


@dataclass(frozen=True, kw_only=True)
class EndingSettings:
    """Settings of the section trainer."""

    max_hours: PositiveFloat | None = None
    """End after this much training time, all continuations together, with a last validation and checkpoint."""
    target_pass_rate: PositiveShare | None = None
    """End at the first validation that reaches this pass rate; it needs a reward that says which answers pass."""
    patience: PositiveInt | None = None
    """End when so many validations in a row were no better than the best one before them, by the pass rate or, where
    there is none, the mean reward."""


@dataclass(frozen=True, kw_only=True)
class RestartSettings:
    """Settings of the section run."""

    grace_s: PositiveFloat = 20.0
    """Seconds that the step which runs has to come to its end, once a signal has asked the run to end. Schedulers kill
    what still runs after 30 s; with a warning of the scheduler (SIGUSR1) there is often more."""
    save_before: Annotated[NonNegativeFloat, "0 does not look"] = 0.0
    """Save and end this many seconds before the machine is taken away, at the end of the last step that fits before;
    0: do not look. When that is, one of the variables SLURM_JOB_END_TIME,
    MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP, SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP or
    STROP_MACHINE_ENDS_AT says, in seconds since 1970; where none does, the run says so and trains without."""
    max_restarts: Annotated[NonNegativeInt, "0 is never"] = 2
    """How often a run begins again by itself from its last checkpoint, with new processes, after a worker process died
    or did not answer; it counts from the last checkpoint on. An error that a worker raises ends the run."""


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
