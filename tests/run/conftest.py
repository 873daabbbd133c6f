"""What the tests that kill processes share."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MEMORY_DISK = Path("/dev/shm")


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A temporary folder on the memory disk where there is one: an fsync costs nothing there."""
    parent = MEMORY_DISK if MEMORY_DISK.is_dir() else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="strop-test-") as folder:
        yield Path(folder)


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Starts processes that are gone when the test ends, however it ends."""
    started: list[subprocess.Popen[str]] = []

    def start_one(command: list[str]) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
