"""Flags of the compiler: those of one kind of processor are given there alone."""

from __future__ import annotations

import platform

import pytest
from fork_server import run_program

from strop.engines.checksum import host
from strop.engines.cpu import library
from strop.rollout.native.cpu import kernel

WIDE = "-mprefer-vector-width=512"
PROGRAM = """
import importlib, platform
from strop.engines.checksum import host
from strop.engines.cpu import library
from strop.rollout.native.cpu import kernel
from strop.utils import c_library
platform.machine = lambda: "aarch64"
for module in (c_library, host, library, kernel):
    importlib.reload(module)
print([flag for module in (host, library, kernel) for flag in module.FLAGS if flag.startswith("-m")])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86")
def test_wide_vectors_are_asked_for_on_x86() -> None:
    assert all(WIDE in module.FLAGS for module in (host, library, kernel))


def test_nothing_of_x86_is_asked_for_on_arm() -> None:
    result = run_program(["-c", PROGRAM])
    assert result.stdout.strip() == str(["-march=native"] * 3), result.stderr
