"""Watch over the time that a checkpoint takes to write.

One that takes long is said, and one that takes too long ends the process: nothing interrupts a write that a disk or a
file server does not answer, so a thread beside it looks at the time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from strop.run import RunFolder
from strop.trainer.callbacks import Reporter
from strop.trainer.sections import SECTION_OF_COMMAND
from strop.utils.background import every
from strop.utils.shell_words import shell_word

SLOW_S = 60.0
"""Seconds until the first warning that a checkpoint is still being written, and between the warnings."""
EXIT_CODE = 1
"""Exit code of a process whose disk does not answer."""


@contextlib.contextmanager
def watched(run: RunFolder, step: int, *, say: Reporter, limit_s: float) -> Iterator[None]:
    """Context in which the checkpoint of a step is written; event `slow_disk` afterwards, if it took long.

    Args:
        run: written into.
        step: of the checkpoint.
        say: takes lines for the person who watches.
        limit_s: seconds after which the process ends.
    """
    begun = time.monotonic()

    def look() -> None:
        seconds = time.monotonic() - begun
        if seconds >= limit_s:
            _end(run, step, seconds)
        say(
            f"the checkpoint of step {step} has been written for {seconds:.0f} s: is the disk of {run.path} slow? The "
            f"run waits for up to resources.call_timeout_s = {limit_s:g} s"
        )

    with every(min(SLOW_S, limit_s), look, name="disk"):
        yield
    seconds = time.monotonic() - begun
    if seconds >= SLOW_S:
        run.events.append("slow_disk", step, seconds=seconds)


def _end(run: RunFolder, step: int, seconds: float) -> None:
    """End the process, whatever its main thread waits for; worker processes notice and end by themselves."""
    folder, command = run.path, SECTION_OF_COMMAND.get(run.made_by, "train")
    text = (
        f"\nthe checkpoint of step {step} could not be written within resources.call_timeout_s ({seconds:.0f} s): the "
        f"disk of {folder} does not answer. The run ends here; the checkpoint before is intact, and "
        f"`strop {command} --resume {shell_word(folder)}` goes on from it once the disk answers\n"
    )
    with contextlib.suppress(OSError):  # a terminal that closed
        os.write(2, text.encode())
    os._exit(EXIT_CODE)
