"""The runs of a sweep, each `strop train` in a process of its own, so many at a time.

Concurrency: one thread, which looks at its processes several times a second. They are in sessions of their own: a
Ctrl-C reaches the sweep alone, which asks them to end with SIGTERM, so that each saves at the end of its step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LOOK_EVERY_S = 0.1
_END_WITHIN_S = 120.0
"""A run may finish its step (strop.trainer.fault_tolerance.signals) and write a checkpoint; then it is killed."""


@dataclass(kw_only=True)
class Job:
    """A run to be made."""

    name: str
    command: Sequence[str]
    """Words after `strop`."""
    log: Path
    """File for its standard output and standard error."""
    code: int | None = None
    """Exit code; None before the end."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)


def run_all(
    jobs: Sequence[Job],
    *,
    at_once: int,
    places: Sequence[Mapping[str, str]],
    started: Callable[[Job], None],
    ended: Callable[[Job], None],
) -> None:
    """Carry out every job; one that fails does not stop the others.

    Args:
        jobs: in the order in which they start.
        at_once: how many run at the same time.
        places: variables of the environment for each of these, such as the device that it may use.
        started, ended: told of each.

    Raises:
        KeyboardInterrupt: the processes have ended before it goes on.
    """
    waiting = list(jobs)
    running: dict[int, Job] = {}
    try:
        while waiting or running:
            for slot in range(at_once):
                if waiting and slot not in running:
                    running[slot] = job = waiting.pop(0)
                    _start(job, places[slot])
                    started(job)
            time.sleep(_LOOK_EVERY_S)
            for slot, job in list(running.items()):
                assert job.process is not None, "it was started"
                job.code = job.process.poll()
                if job.code is not None:
                    del running[slot]
                    ended(job)
    finally:
        _end([job for job in running.values() if job.process is not None])


def _start(job: Job, variables: Mapping[str, str]) -> None:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        job.process = subprocess.Popen(
            [sys.executable, "-m", "strop", *job.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **variables},
            start_new_session=True,
        )


def _end(jobs: Sequence[Job]) -> None:
    """Ask what still runs to end, and wait for it."""
    processes = [job.process for job in jobs if job.process is not None]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    until = time.monotonic() + _END_WITHIN_S
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
