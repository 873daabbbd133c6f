"""A process without a model, measured."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from fork_server import run_program
from plan_configs import config_of

from strop.trainer.plan import baseline as module
from strop.trainer.plan.baseline import ASSUMED, Baseline, baseline, baseline_of


def test_a_process_says_how_much_memory_it_has() -> None:
    done = run_program(["-c", module._PROCESS + module._ONE])
    assert done.returncode == 0, done.stderr
    assert 100 << 20 < Baseline(**json.loads(done.stdout)).num_bytes < 4 << 30


@pytest.mark.slow
def test_ranks_say_what_it_costs_them_to_talk() -> None:
    measured = baseline.__wrapped__(is_one_of_several=True)
    assert 100 << 20 < measured.num_bytes < 4 << 30
    assert 0 < measured.call_s < 1
    assert measured.bytes_per_s > 1e6


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit(3)", "its process ended with status 3"),
        ("raise OSError('no room')", "its process ended with status 1: OSError: no room"),
        ("import os\nos.kill(os.getpid(), 9)", "its process was ended by SIGKILL, perhaps for memory"),
        ("import os\nos.kill(os.getpid(), 15)", "its process was ended by SIGTERM"),
        *((program, "the process said something else") for program in (
            "print('a warning')", "print('[1]')", "print('{}')", "",
        )),
        *((program, "other programs took more time than what was measured") for program in (
            """print('{"num_bytes": 5, "call_s": -1e-6}')""", """print('{"num_bytes": 5, "bytes_per_s": 0.0}')""",
        )),
    ],
)  # fmt: skip
def test_a_process_that_does_not_say_it_is_assumed(
    monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    monkeypatch.setattr(module, "_PROCESS", program)
    monkeypatch.setattr(module, "_ONE", "")
    assumed = baseline.__wrapped__()
    assert assumed == ASSUMED
    assert assumed.reason == reason
    assert not ASSUMED.is_measured


def test_a_process_that_does_not_end_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROCESS", "import time\ntime.sleep(60)")
    monkeypatch.setattr(module, "TIMEOUT_S", 0.05)
    assumed = baseline.__wrapped__()
    assert assumed == ASSUMED
    assert assumed.reason == "its process had not ended after 0.05 s"


def test_a_process_whose_child_keeps_its_output_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended, though its output is still open."""
    pids = tmp_path / "pids"
    child = f"subprocess.Popen(['sleep', '60']); pathlib.Path({str(pids)!r}).write_text(str(child.pid))"
    monkeypatch.setattr(module, "_PROCESS", f"import pathlib, subprocess\nchild = {child}\n")
    monkeypatch.setattr(module, "_ONE", "print('{\"num_bytes\": 5}')")
    monkeypatch.setattr(module, "TIMEOUT_S", 30.0)
    try:
        assert baseline.__wrapped__() == Baseline(num_bytes=5)
        os.kill(int(pids.read_text()), 0)
    finally:
        if pids.exists():
            os.kill(int(pids.read_text()), signal.SIGKILL)


def test_ranks_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails or waits for ever is assumed too, and no process is left."""
    monkeypatch.setattr(module, "_PROCESS", "import os, sys, time\n")
    said = "print('{\"num_bytes\": 5}')"
    monkeypatch.setattr(module, "_TWO", said)
    assert baseline.__wrapped__(is_one_of_several=True) == Baseline(num_bytes=5)
    monkeypatch.setattr(module, "_TWO", f"if sys.argv[1] == '1': sys.exit(1)\n{said}")
    assert baseline.__wrapped__(is_one_of_several=True) == ASSUMED
    late = tmp_path / "late"
    waits = f"time.sleep(5); os.mkdir({str(late)!r})"
    monkeypatch.setattr(module, "_TWO", f"if sys.argv[1] == '0': sys.exit(1)\n{waits}")
    assert baseline.__wrapped__(is_one_of_several=True) == ASSUMED
    assert not late.exists(), "nobody waits for the other rank of one that has failed"
    monkeypatch.setattr(module, "_TWO", "time.sleep(60) if sys.argv[1] == '0' else sys.exit(3)")
    assert baseline.__wrapped__(is_one_of_several=True).reason == "its process ended with status 3"
    started = tmp_path / "started"
    waits = f"os.mkdir({str(started)!r} + str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(module, "_TWO", f"if sys.argv[1] == '1': {waits}\n{said}")
    pids: list[int] = []
    for limit_s in (0.5, 2.0, 8.0, 32.0):  # until it has waited: its start takes longer beside other programs
        monkeypatch.setattr(module, "TIMEOUT_S", limit_s)
        assert baseline.__wrapped__(is_one_of_several=True) == ASSUMED
        pids = [int(path.name.removeprefix("started")) for path in tmp_path.iterdir()]
        if pids:
            break
    (pid,) = pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_says_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROCESS", "import json\ndef most():\n    return 5\nprint('a warning')\n")
    assert baseline.__wrapped__() == Baseline(num_bytes=5, is_measured=True)


def test_ranks_of_a_run_are_measured_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(module, "baseline", lambda **how: asked.append(how))
    baseline_of(config_of(tmp_path))
    baseline_of(config_of(tmp_path, "resources.runtime=ray", "resources.ranks=2"))
    assert asked == [
        {"uses_ray": False, "is_one_of_several": False},
        {"uses_ray": True, "is_one_of_several": True},
    ]
