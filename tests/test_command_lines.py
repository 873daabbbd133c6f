"""The command line of a process that ends while it is asked for."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
from command_lines import command_line


def test_a_process_that_has_ended_has_none() -> None:
    words = [sys.executable, "-c", "print(flush=True); input()"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # before it runs Python it may have none
    found = psutil.Process(process.pid)
    assert command_line(found).endswith("-c print(flush=True); input()")
    process.kill()
    deadline = time.monotonic() + 10
    while found.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert command_line(found) == ""  # nobody has waited for it
    process.communicate()
    assert command_line(found) == ""
