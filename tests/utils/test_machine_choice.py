"""Choices of a machine: measured once, the same in every process, and said where they cannot be kept."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fork_server import run_program

from strop.utils import machine_choice as module
from strop.utils.machine_choice import machine_choice

PROGRAM = """
import sys, time
from strop.utils.machine_choice import machine_choice
def measured():
    time.sleep(0.5)  # all of them are at it
    return float(sys.argv[1])
print(machine_choice("side", measured, at_least=1.5))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def never() -> float:
    raise AssertionError("it was measured before")


def test_it_is_measured_once(cache: Path) -> None:
    for name, speedup, answer in (("side", 2.0, True), ("other", 1.25, True), ("slow", 1.24, False)):
        assert machine_choice(name, lambda speedup=speedup: speedup, at_least=1.25) is answer
        assert machine_choice(name, never, at_least=1.25) is answer


def test_it_is_measured_on_one_thread_and_told(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in range(2):
            assert not machine_choice("side", lambda: float(torch.get_num_threads()), at_least=2)
        with pytest.raises(ZeroDivisionError):
            machine_choice("broken", lambda: 1 / 0, at_least=2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    (path,) = cache.rglob("side-*.json")
    assert json.loads(path.read_text()) == {"answer": False, "speedup": 1.0}
    (record,) = caplog.records
    assert (
        record.getMessage() == f"False: a speedup of 1.00 was measured and is kept for this machine in {path}"
    )


X86 = "vendor_id\t: AuthenticAMD\nmodel name\t: {}\ncpu MHz\t\t: {}\nflags\t\t: fpu avx2\n"
ARM = "processor\t: 0\nBogoMIPS\t: {}\nFeatures\t: fp asimd {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n"


@pytest.mark.parametrize(
    ("first", "same", "others"),
    [
        (X86.format("EPYC", "2400.1"), X86.format("EPYC", "3100.7"), [X86.format("Ryzen", "2400.1"), None]),
        (
            ARM.format("243.75", "sve", "0xd40"),
            ARM.format("50.00", "sve", "0xd40"),
            [ARM.format("243.75", "sve", "0xd4f"), ARM.format("243.75", "", "0xd40"), None],
        ),
    ],
    ids=["x86", "arm"],
)
def test_another_processor_is_measured_anew(
    first: str, same: str, others: list[str | None], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(text: str | None) -> str:
        """The word for a machine whose kernel says this, or nothing."""
        (cache / "cpuinfo").write_text(text or "")
        monkeypatch.setattr(module, "CPU_INFO", cache / ("none" if text is None else "cpuinfo"))
        return module._this_machine()

    words = [at(first), *map(at, others)]
    assert len(set(words)) == len(words)
    assert at(same) == words[0]


@pytest.mark.parametrize("of", ["machine", "processor"])
def test_without_the_kernels_word_platforms_differ(
    of: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_INFO", cache / "none")
    before = module._this_machine()
    monkeypatch.setattr(platform, of, lambda: "another")
    assert module._this_machine() != before


def test_processes_that_measure_at_once_agree(cache: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        running = list(threads.map(lambda word: run_program(["-c", PROGRAM, word]), ("2.0", "1.0")))
    answers = {program.stdout.strip() for program in running}
    assert len(answers) == 1, running
    assert answers <= {"True", "False"}


def test_a_file_that_is_no_answer_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITING_S", 0.05)
    machine_choice("side", lambda: 2.0, at_least=1)
    (path,) = cache.rglob("side-*.json")
    for text in ("[]", ""):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"side-.*json has no answer to read: delete it"):
            machine_choice("side", never, at_least=1)


def test_without_hard_links_the_first_answer_is_kept_and_a_file_being_written_is_waited_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert machine_choice("side", lambda: 2.0, at_least=1)
    assert machine_choice("side", never, at_least=1)
    (path,) = cache.rglob("side-*.json")
    module._keep(path, 0.5, False)  # another process, which was slower
    text = path.read_text()
    assert json.loads(text) == {"answer": True, "speedup": 2.0}
    path.write_text("")
    writer = threading.Timer(0.1, path.write_text, [text])
    writer.start()
    assert machine_choice("side", never, at_least=1)
    writer.join()
    assert not caplog.records


def test_where_nothing_can_be_kept_each_measures_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    speedups = iter([2.0, 0.5])
    with monkeypatch.context() as patch:
        patch.setattr(module, "_place", lambda whole, path: path.parent.joinpath("none", "none").touch())
        assert machine_choice("side", lambda: next(speedups), at_least=1)
        assert not machine_choice("side", lambda: next(speedups), at_least=1)
    assert caplog.text.count("may be another one in another process") == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "other"))
    (cache / "other").mkdir()
    (cache / "other" / "strop").write_text("in the way")
    assert machine_choice("side", lambda: 2.0, at_least=1)
    assert caplog.text.count("may be another one in another process") == 3
