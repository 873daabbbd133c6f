"""Flags of the compiler: those of one kind of processor are given there alone."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from strop.engines.checksum import host
from strop.engines.cpu import library
from strop.rollout.native.cpu import kernel

WIDE = "-mprefer-vector-width=512"
PROCESS = """
import platform
platform.machine = lambda: "aarch64"
from strop.engines.checksum import host
from strop.engines.cpu import library
from strop.rollout.native.cpu import kernel
print([flag for module in (host, library, kernel) for flag in module.FLAGS if flag.startswith("-m")])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86")
def test_wide_vectors_are_asked_for_on_x86() -> None:
    assert all(WIDE in module.FLAGS for module in (host, library, kernel))


def test_nothing_of_x86_is_asked_for_on_arm() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == str(["-march=native"] * 3)
