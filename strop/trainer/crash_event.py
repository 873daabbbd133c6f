"""The record of an error that ends a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from strop.run import RunFolder
from strop.trainer.callbacks import StopRequest
from strop.trainer.timing import Stages


@contextlib.contextmanager
def recording_failure(run: RunFolder, step: int, stages: Stages, stop: StopRequest) -> Iterator[None]:
    """Around a step with its records, validation and checkpoint: an error in it is the event `crashed`, or
    `interrupted` where somebody asked the run to end, and goes on. A disk that takes no event does not hide it."""
    try:
        yield
    except BaseException as error:
        was_asked_to_end = isinstance(error, KeyboardInterrupt) or stop.number
        kind = "interrupted" if was_asked_to_end else "crashed"
        is_signal = isinstance(error, KeyboardInterrupt) and stop.number  # Ray gives it another class
        reason = stop.reason if is_signal else f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            run.events.append(kind, step, fsync=True, phase=stages.current, error=reason)
        raise
