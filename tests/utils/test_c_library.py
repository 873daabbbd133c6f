"""Flags of the compiler: those of one kind of processor are given there alone."""

from __future__ import annotations

import ctypes
import os
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


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="needs gcc on x86")
def test_processors_that_share_a_cache_have_a_library_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A home folder on several nodes: code for one processor ends a process on another (SIGILL).
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "source.c"
    source.write_text("int wide(void) { return __AVX2__ + 0; }\n", encoding="utf-8")
    gcc, path = shutil.which("gcc"), os.environ["PATH"]
    made = []
    for processor in ("haswell", "znver3"):
        folder = tmp_path / processor
        folder.mkdir()
        compiler = folder / "gcc"
        words = f'"${{@/-march=native/-march={processor}}}"'
        compiler.write_text(f"#!/bin/bash\nexec {gcc} {words}\n", encoding="utf-8")
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{path}")
        made.append(c_library(source, flags=["-march=native", "-fPIC"], doing="this test"))
    assert None not in made
    assert made[0] != made[1]
