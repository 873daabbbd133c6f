"""A machine that is about to be taken away: whether another step fits before (run.save_before)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from strop.run import RunFolder
from strop.run.config import RunConfig
from strop.trainer.callbacks import Reporter

MACHINE_ENDS = (
    "SLURM_JOB_END_TIME", "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", "STROP_MACHINE_ENDS_AT",
)  # fmt: skip
"""Variables of the environment that say when the machine is taken away, in seconds since 1970."""


class MachineEnd:
    """Time at which the machine is taken away, and the longest step so far, which has to fit before."""

    def __init__(self, settings: RunConfig, environment: Mapping[str, str] = os.environ) -> None:
        """Read when that is.

        Raises:
            ValueError: run.save_before is set, and a variable has something else than a time.
        """
        self._margin_s, self._longest_s = settings.save_before, 0.0
        self._at: float | None = None
        self._why_unknown = ""
        times = {name: environment[name] for name in MACHINE_ENDS if environment.get(name)}
        if not times:
            self._why_unknown = f"none of {', '.join(MACHINE_ENDS)} is set"
            return
        name, text = next(iter(times.items()))
        try:
            at = float(text)
        except ValueError:
            raise ValueError(
                f"{name} is {text!r}, which is no time in seconds since 1970, and run.save_before reads it: mend it, "
                f"or set run.save_before=0"
            ) from None
        if at > time.time():
            self._at = at
        else:  # set for an earlier job, or the machine would be gone
            self._why_unknown = f"{name} is {text}, which is past"

    def warn(self, run: RunFolder, step: int, say: Reporter) -> None:
        """Warn that run.save_before has no effect, where nothing says when the machine ends: a line and an event."""
        if self._why_unknown:
            message = (
                f"run.save_before={self._margin_s:g} has no effect: nothing says when this machine is taken away, as "
                f"{self._why_unknown} (seconds since 1970); a signal still saves and ends the run"
            )
            say(message)
            run.events.append("no_end_known", step, message=message)

    def passed(self, seconds: float) -> str:
        """A step with everything around it took so long; why no other one fits, or nothing."""
        self._longest_s = max(self._longest_s, seconds)
        if self._at is None:
            return ""
        seconds_left = self._at - time.time()
        if seconds_left >= self._longest_s + self._margin_s:
            return ""
        return (
            f"the machine is taken away in {seconds_left:.0f} s, and another step may take {self._longest_s:.0f} s "
            f"besides run.save_before={self._margin_s:g}"
        )
