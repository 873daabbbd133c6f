"""Processes of tests, forked from one that has imported what they all import: a start takes milliseconds of a core,
where a fresh interpreter takes seconds.

There is one such server for each process of pytest (multiprocessing has but one), so what it imports is named here and
nowhere else. It ends with the process of pytest.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOADED = (
    "pytest",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "strop.cli.main",
    "strop.trainer.train",
)
"""Modules of the server. None of tests/, which is not on its path."""
_DUMP_S = 5.0
"""Time to say it."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(PRELOADED))


def not_preloaded() -> list[str]:
    """Modules of `PRELOADED` that this process began without: a server passes over what it cannot import."""
    return [name for name in PRELOADED if name not in sys.modules]


def start_program(
    words: Sequence[str | Path],
    *,
    out: Path,
    err: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start `python WORDS...` in a fork of the server; the caller ends it.

    It is not quite the process of a user:

    - `PRELOADED` and what that imports are there, so that `strop.trainer.train` is an attribute of strop that the
      program need not import;
    - the start method of multiprocessing is that of the server;
    - variables that are read before a program begins, or when a library is imported, are those of the server: of
      malloc, of Python itself, OMP_NUM_THREADS, HF_*.

    A program that is about any of these is a subprocess.

    Args:
        words: `-c TEXT`, `-m MODULE` or a file, and the arguments of the program.
        out: file for standard output.
        err: file for standard error.
        cwd: current directory; None: that of this process.
        env: all environment variables; None: those of this process.
    """
    arguments = [str(word) for word in words], out, err, cwd or Path.cwd(), dict(env or os.environ)
    process = CONTEXT.Process(target=_be_program, args=arguments)
    process.start()
    return process


def run_program(
    words: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `start_program` starts it.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed; its notes are what it wrote, and where it was.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start_program(words, out=out, err=err, cwd=cwd, env=env)
        try:
            process.join(timeout_s)
            if process.exitcode is None:
                raise _too_late(process, words, timeout_s, out, err)
            return subprocess.CompletedProcess(
                [*map(str, words)], process.exitcode, out.read_text(), err.read_text()
            )
        finally:
            process.kill()
            process.join()
            process.close()


def _too_late(
    process: BaseProcess, words: Sequence[str | Path], timeout_s: float, out: Path, err: Path
) -> subprocess.TimeoutExpired:
    """End it such that it says where it is."""
    assert process.pid is not None, "it was started"
    os.kill(process.pid, signal.SIGABRT)
    process.join(_DUMP_S)
    error = subprocess.TimeoutExpired([*map(str, words)], timeout_s)
    error.add_note(f"{out.read_text()}\n{err.read_text()}")
    return error


def _be_program(words: list[str], out: Path, err: Path, cwd: Path, env: dict[str, str]) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    faulthandler.enable(file=2)  # which SIGABRT makes speak
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if missing := not_preloaded():
        raise RuntimeError(f"the server of processes could not import {', '.join(missing)}")
    how, rest = (words[0], words[1:]) if words[0] in ("-c", "-m") else ("", words)
    first = {"-c": "", "-m": str(cwd)}.get(how, str(Path(rest[0]).parent))
    places = env.get("PYTHONPATH", "").split(os.pathsep)
    tests = Path(__file__).parent  # strop may be installed as a folder of the path, beside them
    installed = [path for path in sys.path if path and not Path(path).is_relative_to(tests)]
    sys.path[:] = [first, *filter(None, places), *installed]
    sys.argv = [how or rest[0], *rest[1:]]
    gc.freeze()  # what the server has imported is not looked through at each collection
    try:
        if how == "-c":
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        elif how == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(rest[0], run_name="__main__")
    finally:  # as an interpreter ends, which a process of multiprocessing does not
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
