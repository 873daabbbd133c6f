"""The heap of a process that trains stays as large as a step has made it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PIECES = """
import ctypes
from strop.utils.glibc import keep_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

pieces = (ctypes.c_void_p * 64)()

def fill():  # nothing of Python's own may come to lie behind the pieces, which would keep them
    for number in range(64):
        pieces[number] = libc.malloc(1 << 20)
        ctypes.memset(pieces[number], 1, 1 << 20)
    for piece in pieces:
        libc.free(ctypes.c_void_p(piece))

before = resident()
if {is_kept}:
    keep_heap()
for _ in range(3):
    fill()
print((resident() - before) >> 20)
"""
"""Prints the MiB that 64 of them, taken and freed, have left to the process."""


@pytest.mark.skipif(sys.platform != "linux", reason="the heap is that of glibc")
@pytest.mark.parametrize(
    ("is_kept", "environment", "stays"),
    [(True, {}, True), (False, {}, False), (True, {"MALLOC_TRIM_THRESHOLD_": "131072"}, False)],
    ids=["kept", "as it is", "as the environment says"],
)
def test_freed_memory_stays_with_the_process(is_kept: bool, environment: dict[str, str], stays: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PIECES.format(is_kept=is_kept)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (int(done.stdout) > 60) == stays, done.stdout
