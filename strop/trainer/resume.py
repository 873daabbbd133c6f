"""Resume of a run from its last valid checkpoint, with or without changed settings.

A run that is continued with its own settings makes the samples and weights that it would have made without the break.
resume_overrides.py has the settings that may be given anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.run import Checkpoint, RunError, RunFolder
from strop.trainer.config import Config


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Continuation of a run with the settings that it has."""

    config: Config
    """Its settings."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """Changed settings with their old values, by full key."""
    after: Mapping[str, Any] = field(default_factory=dict)
    """Changed settings with their new values, by full key."""
    extends_run: bool = False
    """A limit of the run was changed, so one that is finished goes on."""

    def validate(self, step: int) -> None:
        """Refuse, by a ConfigError, to continue from this step, which is after an end that was given anew."""

    def lines(self, step: int) -> Iterable[str]:
        """Lines about the changes for the person who resumes at this step."""
        return ()

    def save(self, run: RunFolder) -> None:
        """Write the settings that hold from here on, where they are others."""


def roll_back(run: RunFolder, continuation: Continuation) -> tuple[Checkpoint | None, list[str]]:
    """The last valid checkpoint of a run, to which the run is rolled back, and what the person who
    resumes should know. None: from the beginning, because no checkpoint was written yet.

    Args:
        run: to continue.
        continuation: with which settings.

    Raises:
        RunError: checkpoints exist, but none is valid.
        ConfigError: the settings end the run before what it has done.
    """
    checkpoint, lines = run.checkpoints.latest_valid()
    if checkpoint is None and run.events.read("checkpoint"):
        raise RunError(
            f"{run.path} has no valid checkpoint left ({'; '.join(lines)}); restore its checkpoints folder, or start "
            f"again in another folder with --out"
        )
    step = 0 if checkpoint is None else checkpoint.step
    continuation.validate(step)
    before = run.ledger.counts()
    run.rollback(step, settings=continuation.after, before=continuation.before)
    after = run.ledger.counts()
    repeated = before["issued"] - after["issued"]
    lines.append(
        f"resumed at step {step}: {after['trained']} samples trained, {repeated} after that step are made again, "
        f"0 lost"
    )
    return checkpoint, lines
