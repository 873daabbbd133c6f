"""The process beside vLLM's engine, without vLLM: it ends with its owner, and its children with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from program_path import python_path

from strop.rollout.vllm.process import INSIDE, PARENT

LIMIT_S = 20.0

OWNER = """
import sys
from pathlib import Path
from strop.rollout.vllm.process import ServerProcess
process = ServerProcess(Path(sys.executable), log=Path(sys.argv[1]), env={})
try:
    process.ask_now("nothing", timeout_s=60)
except RuntimeError as error:  # it obeys, so it is up
    assert "KeyError" in str(error), error
print(process.pid, flush=True)
sys.stdin.read()
"""

PARENT_AND_CHILD = """
import multiprocessing, os, sys, time
from strop_parent import end_with_parent, follow_forks

def sleep():
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__mp_main__":
    end_with_parent()
if __name__ == "__main__":
    end_with_parent()
    follow_forks()
    print(os.getpid(), flush=True)
    child = multiprocessing.get_context(sys.argv[1]).Process(target=sleep)
    child.start()
    child.join()
"""


def gone(pids: Sequence[int]) -> bool:
    """Whether none of them runs, soon."""
    deadline = time.monotonic() + LIMIT_S
    while any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def started(code: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": python_path(INSIDE),
            PARENT: str(os.getpid()),
        },
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def number(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_server_ends_with_an_owner_that_is_killed(is_stopped: bool, tmp_path: Path) -> None:
    with started(OWNER, tmp_path, str(tmp_path / "log")) as owner:
        server = number(owner)
        assert os.getpgid(server) == server, "it leads a group, which is ended as a whole"
        if is_stopped:
            os.kill(server, signal.SIGSTOP)
        owner.kill()
        owner.wait()
        if is_stopped:
            os.kill(server, signal.SIGCONT)
        assert gone([server])


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_child_ends_with_a_parent_that_is_killed(how: str, tmp_path: Path) -> None:
    with started(PARENT_AND_CHILD, tmp_path, how) as parent:
        pids = [number(parent), number(parent)]
        parent.kill()
        parent.wait()
        assert gone(pids)


def test_who_is_an_orphan_from_the_beginning_ends_at_once(tmp_path: Path) -> None:
    code = """
    import os, time
    os.environ["STROP_PARENT"] = "1" if os.getppid() != 1 else "2"
    from strop_parent import end_with_parent
    end_with_parent()
    time.sleep(600)
    """
    with started(code, tmp_path) as orphan:
        assert orphan.wait(LIMIT_S) == -signal.SIGKILL
