"""A checkpoint that takes long is said, and one that takes too long ends the process: a disk may hang for good.

Nothing interrupts a write that a disk or a file server does not answer, so a thread beside it looks at the time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from strop.base.background import every
from strop.run import RunFolder

SLOW_S = 60.0
"""From when on it is said, and how often, in seconds."""
EXIT_CODE = 1


class DiskWatch:
    """Looks at what is being written into a run."""

    def __init__(self, run: RunFolder, *, say: Callable[[str], None], limit_s: float) -> None:
        """Args:
        run: written into.
        say: takes lines for the person who watches.
        limit_s: seconds after which the process ends.
        """
        self._run, self._say, self._limit_s = run, say, limit_s

    @contextmanager
    def writing(self, step: int) -> Iterator[None]:
        """While the checkpoint of a step is being written; event `slow_disk` afterwards, if it took long."""
        begun = time.monotonic()

        def look() -> None:
            seconds = time.monotonic() - begun
            if seconds >= self._limit_s:
                _end(self._run.path, step, seconds)
            self._say(
                f"the checkpoint of step {step} has been written for {seconds:.0f} s: is the disk of {self._run.path} "
                f"slow? The run waits for up to resources.call_timeout_s = {self._limit_s:g} s"
            )

        with every(min(SLOW_S, self._limit_s), look, name="disk"):
            yield
        seconds = time.monotonic() - begun
        if seconds >= SLOW_S:
            self._run.events.append("slow_disk", step, seconds=seconds)


def _end(folder: Path, step: int, seconds: float) -> None:
    """End the process, whatever its main thread waits for; worker processes notice and end by themselves."""
    text = (
        f"\nthe checkpoint of step {step} could not be written within resources.call_timeout_s ({seconds:.0f} s): the "
        f"disk of {folder} does not answer. The run ends here; the checkpoint before is intact, and "
        f"`strop train --resume {folder}` goes on from it once the disk answers\n"
    )
    with contextlib.suppress(OSError):  # a terminal that closed
        os.write(2, text.encode())
    os._exit(EXIT_CODE)
