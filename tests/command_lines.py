"""Command lines of processes that may end at any time."""

from __future__ import annotations

import contextlib

import psutil


def command_line(process: psutil.Process) -> str:
    """Words of a process; empty where it has ended, whether somebody has waited for it or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""
