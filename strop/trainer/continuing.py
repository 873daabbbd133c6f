"""How a run is continued: from which checkpoint, and with which settings anew.

A run that is continued with its own settings makes the samples and weights that it would have made without the break.
Which settings may be given anew, the guest steering/ says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.base.guests import needed
from strop.run import Checkpoint, RunError, RunFolder
from strop.trainer.config import Config
from strop.trainer.loading import read

OF_THE_MACHINE = "resources."
"""What holds for one continuation alone."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """How a run goes on."""

    config: Config
    """Its settings, with those given anew."""
    own: Config
    """Those of `config` that hold from here on; the others (OF_THE_MACHINE) hold for this continuation."""
    before: Mapping[str, Any]
    """What was changed, as it was: full key to value."""
    after: Mapping[str, Any]
    """What was changed, as it is now."""
    is_longer: bool = False
    """Something of what ends a run was changed, so one that is finished goes on."""
    check_reach: Callable[[int], None] = lambda step: None
    """Refuses, by a ConfigError, to continue from this step, which is after the end that was given anew."""

    def lines(self, step: int) -> Iterator[str]:
        """What the person who resumes at this step should know of the changes."""
        for key, value in self.after.items():
            held = "for this continuation" if key.startswith(OF_THE_MACHINE) else f"from step {step + 1} on"
            yield f"{key}={json.dumps(value)} {held}; it was {json.dumps(self.before[key])}"


def settings_to_continue(file: Path, overrides: Sequence[str], *, text: str) -> Continuation:
    """The settings of a run with overrides on top.

    Args:
        file: config.yaml of the run, for messages.
        overrides: of the command line.
        text: content of that file.

    Raises:
        ConfigError: the file or an override cannot be used, or one would make it another run.
    """
    before = read(file, text=text)
    if not overrides:
        return Continuation(config=before, own=before, before={}, after={})
    anew = needed("settings given anew", f"{overrides[0]} is given beside --resume")
    continuation: Continuation = anew(file, overrides, before, text=text)
    return continuation


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
    continuation.check_reach(step)
    before = run.ledger.counts()
    run.rollback(step, settings=continuation.after, before=continuation.before)
    after = run.ledger.counts()
    repeated = before["issued"] - after["issued"]
    lines.append(
        f"resumed at step {step}: {after['trained']} samples trained, {repeated} after that step are made again, "
        f"0 lost"
    )
    return checkpoint, lines
