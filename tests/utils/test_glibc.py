"""The heap of a process that trains stays as large as a step has made it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PIECES = """
import ctypes, os
from strop.utils.glibc import keep_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def fill():  # and take nothing else, which could lie behind the pieces and hold them
    pieces = [ctypes.c_void_p(libc.malloc(1 << 20)) for _ in range(64)]
    for piece in pieces:
        ctypes.memset(piece, 1, 1 << 20)
    for piece in pieces:
        libc.free(piece)

before = resident()
if {is_kept}:
    keep_heap(is_recomputed={is_recomputed})
for _ in range(3):
    fill()
print((resident() - before) >> 20)
"""
"""Prints the MiB that 64 of them, taken and freed, have left to the process."""


@pytest.mark.skipif(sys.platform != "linux", reason="the heap is that of glibc")
@pytest.mark.parametrize(
    ("is_kept", "is_recomputed", "environment", "stays"),
    [
        (True, False, {}, True),
        (True, True, {}, False),
        (False, False, {}, False),
        (True, False, {"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
    ],
    ids=["kept", "kept where activations are computed again", "as it is", "as the environment says"],
)
def test_freed_memory_stays_with_the_process(
    is_kept: bool, is_recomputed: bool, environment: dict[str, str], stays: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PIECES.format(is_kept=is_kept, is_recomputed=is_recomputed)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (int(done.stdout) > 60) == stays, done.stdout
