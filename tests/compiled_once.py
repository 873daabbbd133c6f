"""Compilation of test files, divided among the processes of `make test`: in a fresh clone, where nothing is compiled,
each of them would do it for all files, which takes six seconds."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def compile_share(files: list[Path], number: int, of: int) -> None:
    """Leave this process's share of the files as pytest imports them, in the folders that it reads them from. One that
    cannot be compiled is for pytest to report."""
    hooks: list[Any] = [f for f in sys.meta_path if type(f).__name__ == "AssertionRewritingHook"]
    if sys.dont_write_bytecode or not hooks:  # --assert=plain has none
        return
    for file in files[number::of]:
        module = _NeverRun(file.stem)
        module.__spec__ = importlib.util.spec_from_file_location(file.stem, file)
        with contextlib.suppress(_Compiled, SyntaxError, OSError, ValueError):
            hooks[0].exec_module(module)


class _Compiled(Exception):
    """What comes next is to run the file."""


class _NeverRun(ModuleType):
    """A module without a namespace to run in."""

    @property
    def __dict__(self) -> Any:
        raise _Compiled
