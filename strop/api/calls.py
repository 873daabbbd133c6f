"""The frame of a call that makes a run: its folder, its beginning or continuation, and interrupts by the caller."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from strop.api.overrides import Settings, override_of, overrides_of
from strop.compat.key_aliases import aliases_beside
from strop.run import RunError, RunFolder, is_run
from strop.trainer.config import Config
from strop.trainer.fault_tolerance.signals import SignalRequest
from strop.trainer.loading import load
from strop.trainer.start import Start, resume_run, start_run

T = TypeVar("T")

_ALIASES = aliases_beside(("out", "resume"), "the argument {}=")


def folder_of(out: str | Path | None, kind: str) -> Path:
    """The run folder that a caller names, or one below runs/ with the time in its name.

    Raises:
        ValueError: it is no path.
    """
    if not isinstance(out, str | Path | None):
        raise ValueError(f"out is a {type(out).__name__}: give the path of the run folder")
    return (
        Path(out).expanduser()
        if out is not None
        else Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    )


@contextlib.contextmanager
def begun_run(
    folder: Path,
    given: Callable[[Path], Mapping[str, Any]],
    config: str | Path | None,
    settings: Settings,
    *,
    kind: str,
    resume: bool,
    accept_changes: bool,
) -> Iterator[Start]:
    """The run in this folder, begun or continued. Where it is refused, nothing is left beside its folder.

    Args:
        folder: of the run.
        given: what the caller brought as settings; it writes files into the folder that it is called with.
        config, settings, resume, accept_changes: of the caller.
        kind: of the command.
    """
    if resume:
        yield resume_run(
            folder,
            overrides=overrides_of(settings),
            say=say,
            accept_changes=accept_changes,
            in_shell=False,
            aliases=_ALIASES,
        )
        return
    if is_run(folder):  # before its inputs are written over
        raise RunError(f"{folder} already holds a run: go on with it by resume=True, or choose another out")
    inputs = folder.with_name(f"{folder.name}-inputs")
    is_new = not inputs.exists()
    try:
        brought = given(inputs)
        overrides = [*map(override_of, brought.items()), *overrides_of(settings)]
        loaded: Config = load(config, overrides=overrides, in_shell=False, aliases=_ALIASES)
        say(f"run folder: {folder}")
        yield start_run(folder, loaded, command=["strop", kind], say=say)
    finally:
        if is_new and not is_run(folder):
            shutil.rmtree(inputs, ignore_errors=True)


@contextlib.contextmanager
def carrying_out(run: RunFolder) -> Iterator[RunFolder]:
    """Close the run at the end; one that failed before it had begun is removed, and its folder can be used again."""
    with run:
        try:
            yield run
        except Exception as error:
            run.remove_unstarted(error)
            raise


@contextlib.contextmanager
def resume_hint(function: str, folder: Path) -> Iterator[None]:
    """Print how to resume when the call is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; go on with {function}(out={str(folder)!r}, resume=True)")
        raise


def run_work(work: Callable[[], T], stop: SignalRequest) -> T:
    """Run the work; where this thread has an event loop, as in a notebook, in a thread of its own.

    An interrupt then lets the step that runs come to its end and be saved; a second one, or one outside of a step, ends
    the work where it is.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    thread: list[int] = []

    def in_thread() -> T:
        thread.append(threading.get_ident())
        return work()

    with ThreadPoolExecutor(1, thread_name_prefix="strop") as threads:
        future = threads.submit(contextvars.copy_context().run, in_thread)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if future.done():
                    raise
                if stop.is_in_step and not stop.number:
                    say("this step comes to its end and is saved first; the same again ends the run at once")
                elif thread:
                    _interrupt(thread[0])
                stop.number = signal.SIGINT


def _interrupt(thread: int) -> None:
    """As a signal does in the main thread: a KeyboardInterrupt where the thread is."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))


def say(line: str) -> None:
    """For the person who watches."""
    sys.stderr.write(f"{line}\n")
