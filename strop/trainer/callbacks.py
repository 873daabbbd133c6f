"""What comes to a run from outside while it goes on: who asks it to end (restarts/signals.py knows signals and machines
that are taken away), and who hears of it (functions of a caller in Python)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from strop.run import Checkpoint, RunConfig, RunFolder


class StopRequest:
    """Whether somebody has asked the run to end."""

    number = 0
    """The signal that came; 0 for none."""
    reason = ""
    """What asked, for the records."""

    def listening(self) -> AbstractContextManager[None]:
        """While requests are taken; around all of a run."""
        return nullcontext()

    def start(self, settings: RunConfig) -> None:
        """Take the settings of a run that is about to be prepared.

        Raises:
            ValueError: they ask for what cannot be known here.
        """

    def warn(self, run: RunFolder, step: int, say: Callable[[str], None]) -> None:
        """Say what will not be known, before the run goes on from this step."""

    def step(self) -> AbstractContextManager[None]:
        """A step with its checkpoint: what a request waits for."""
        return nullcontext()

    def check_time(self, say: Callable[[str], None]) -> None:
        """Look whether there is time for another step."""

    def finish_step(self) -> None:
        """The step itself is done: a request waits for the checkpoint now, however long that takes."""


class Callbacks:
    """Who hears of a run, called by the controller, one after another; what they raise ends the run."""

    def on_step_end(self, run: RunFolder, step: int, metrics: Mapping[str, float]) -> str:
        """A step has ended; why the run is to end, or nothing."""
        return ""

    def on_save(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is whole."""
