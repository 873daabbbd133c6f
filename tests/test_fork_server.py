"""Programs of tests in forks of a server."""

from __future__ import annotations

import subprocess

import pytest
from fork_server import run_program

STUCK = """
import time
print("begun", flush=True)
def stuck():
    time.sleep(600)
stuck()
"""


def test_a_program_that_does_not_end_says_where_it_is() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_program(["-c", STUCK], timeout_s=5.0)
    (note,) = caught.value.__notes__
    assert note.startswith("begun\n")
    assert "line 5 in stuck" in note
