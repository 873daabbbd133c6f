"""Choices of a machine: measured once, the same in every process, and said where they cannot be kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strop.utils import machine_choice as module
from strop.utils.machine_choice import machine_choice

PROCESS = """
import sys, time
from strop.utils.machine_choice import machine_choice
def measured():
    time.sleep(0.5)  # all of them are at it
    return sys.argv[1] == "yes"
print(machine_choice("side", measured))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def never() -> bool:
    raise AssertionError("it was measured before")


@pytest.mark.parametrize("answer", [True, False])
def test_it_is_measured_once(answer: bool, cache: Path) -> None:
    assert machine_choice("side", lambda: answer) is answer
    assert machine_choice("side", never) is answer
    assert machine_choice("other", lambda: not answer) is not answer


def test_another_processor_is_measured_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine_choice("side", lambda: True)
    (tmp_path / "cpuinfo").write_text("model name\t: another one\n")
    monkeypatch.setattr(module, "CPU_INFO", tmp_path / "cpuinfo")
    assert not machine_choice("side", lambda: False)


def test_processes_that_measure_at_once_agree(cache: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", PROCESS, word], stdout=subprocess.PIPE, text=True)
        for word in ("yes", "no")
    ]
    answers = {process.communicate(timeout=60)[0].strip() for process in running}
    assert len(answers) == 1
    assert answers <= {"True", "False"}


def test_a_file_that_is_no_answer_is_said(cache: Path) -> None:
    machine_choice("side", lambda: True)
    (path,) = cache.rglob("side-*.json")
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"side-.*json has no answer to read: delete it"):
        machine_choice("side", never)


def test_where_nothing_can_be_kept_each_measures(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "strop").write_text("in the way")
    assert machine_choice("side", lambda: True)
    assert not machine_choice("side", lambda: False)
    assert "may be another one in another process" in caplog.text
