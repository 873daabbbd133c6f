"""Schedule of a run that repeats a recorded one, in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.run import RunError
from strop.run.replay_schedule import StepSchedule
from strop.utils.atomic_io import replace_text
from strop.utils.safe_read import open_regular

FILE = "replay.json"


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Recorded run that another one repeats."""

    run: str
    """Folder of the recorded run."""
    id: str
    last_step: int
    """The recorded run came so far."""
    steps: Mapping[int, StepSchedule]
    """Empty where generation was not ahead: then everything follows from settings and seed."""


def write_recorded(folder: Path, recorded: RecordedRun) -> None:
    """Write it into the folder of the run that repeats it."""
    replace_text(folder / FILE, json.dumps(asdict(recorded)))


def read_recorded(folder: Path) -> RecordedRun | None:
    """Recorded run that the one in this folder repeats; None: it repeats none.

    Raises:
        RunError: the file is damaged.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        with open_regular(file) as stream:
            content = json.load(stream)
        steps = {
            int(step): StepSchedule(ended=tuple(schedule["ended"]), spans=schedule["spans"])
            for step, schedule in content["steps"].items()
        }
        return RecordedRun(
            run=str(content["run"]), id=str(content["id"]), last_step=int(content["last_step"]), steps=steps
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{file} is damaged ({type(error).__name__}: {error}); remove the folder, and repeat the run again"
        ) from error
