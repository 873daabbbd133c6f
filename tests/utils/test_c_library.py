"""Flags of the compiler: those of one kind of processor are given there alone."""

from __future__ import annotations

import ctypes
import platform
import shutil
from pathlib import Path

import pytest
from fork_server import run_program

from strop.engines.checksum import host
from strop.engines.cpu import library
from strop.rollout.native.cpu import kernel
from strop.utils.c_library import c_library

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


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_what_an_included_file_says_now_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, included = tmp_path / "source.c", tmp_path / "elsewhere" / "included.h"
    included.parent.mkdir()
    source.write_text('#include "included.h"\nint number(void) { return NUMBER; }\n', encoding="utf-8")
    for number in (3, 4):
        included.write_text(f"#define NUMBER {number}\n", encoding="utf-8")
        library = c_library(source, flags=["-fPIC"], doing="this test", included=[included])
        assert ctypes.CDLL(str(library)).number() == number
