"""Stop requests (signals and preempted machines are in fault_tolerance/signals.py) and per-step callbacks of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from strop.run import Checkpoint, RunConfig, RunFolder

Reporter = Callable[[str], None]
"""Prints one line for the person who watches."""


class StopRequest:
    """Request from outside to end the run; this one never comes."""

    number = 0
    """The signal that came; 0 for none."""
    reason = ""
    """Origin of the request, for the records."""

    def listening(self) -> AbstractContextManager[None]:
        """Context in which requests are taken; around all of a run."""
        return nullcontext()

    def start(self, settings: RunConfig) -> None:
        """Take the settings of a run that is about to be prepared.

        Raises:
            ValueError: they ask for what cannot be known here.
        """

    def warn(self, run: RunFolder, step: int, say: Reporter) -> None:
        """Warn of settings without effect, before the run goes on from this step."""

    def step(self) -> AbstractContextManager[None]:
        """Context of a step with its checkpoint: a request waits for its end."""
        return nullcontext()

    def check_time(self, say: Reporter) -> None:
        """Make a request where there is no time for another step."""

    def finish_step(self) -> None:
        """The step itself is done: a request waits for the checkpoint now, however long that takes."""


class Callbacks:
    """Callbacks of a run, called by the controller; an exception in one ends the run."""

    def on_step_end(self, run: RunFolder, step: int, metrics: Mapping[str, float]) -> str:
        """Called after a step; gives a reason to end the run, or an empty text."""
        return ""

    def on_save(self, checkpoint: Checkpoint) -> None:
        """Called when a checkpoint is complete."""
