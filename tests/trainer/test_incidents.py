"""What `strop incident` says of runs that ended or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fork_server import start_program
from test_ray_runs import RAY, worker_processes
from tiny_runs import Project, train_in

from strop.cli.main import main
from strop.config import save_config
from strop.observability.viewer.postmortem import _tail, read_beats
from strop.run.heartbeat import SUFFIX, heartbeat
from strop.utils.activity import activity, waiting_on

STUCK = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if os.path.exists({flag!r}):
        time.sleep(600)
    return ord((solution_str or " ")[0]) % 8 / 10
"""


def told(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["incident", str(folder)]) == 0
    return capsys.readouterr().out


def test_a_process_writes_what_it_does_and_waits_for(tmp_path: Path) -> None:
    file = tmp_path / f"controller{SUFFIX}"
    with heartbeat(file):
        (start,) = read_beats(tmp_path)
        assert (start.pid, start.doing, start.num_items, start.item) == (os.getpid(), "", 0, "")
        with activity("step 3"), activity("gen"), waiting_on("e0-1/0"), waiting_on("e0-1/1") as now:
            now("scored")
            while (beat := read_beats(tmp_path)[0]).doing != "step 3, gen" or beat.item_s < 1.0:
                time.sleep(0.05)
            assert (beat.num_items, beat.item) == (2, "e0-1/0"), "the one that has waited longest"
    (end,) = read_beats(tmp_path)
    assert (end.doing, end.num_items) == ("", 0)
    file.write_text("{}")
    assert read_beats(tmp_path) == []


def test_a_finished_run(project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = train_in(tmp_path / "run", project.config("trainer.max_steps=1", "data.val_files=[]"))
    text = told(done.folder, capsys)
    assert f"{done.folder} is finished at step 1; last sign of life " in text
    assert "controller  pid " in text
    assert "step 1  finished: step 1 is the last one" in text


def test_a_run_that_hangs_in_a_scorer_and_is_killed(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK.format(flag=str(tmp_path / "flag")))
    settings = [f"reward.path='{tmp_path / 'stuck.py'}'", "reward.timeout_s=300", "trainer.max_steps=500"]
    save_config(
        project.config(*settings, "data.val_files=[]", "trainer.num_epochs=500"), tmp_path / "config.yaml"
    )
    run = tmp_path / "run"
    words = ["train", "--config", str(tmp_path / "config.yaml"), "--out", str(run)]
    process = start_program(["-m", "strop.cli.main", *words], out=tmp_path / "out", err=tmp_path / "err")
    try:
        wait_for(lambda: '"kind":"step"' in (run / "events.jsonl").read_text(), process.is_alive)
        (tmp_path / "flag").touch()
        wait_for(lambda: [beat for beat in read_beats(run / "logs") if beat.item_s > 2.0], process.is_alive)
        text = told(run, capsys)
        assert f"{run} is running at step " in text
        assert ", gen for " in text
        assert "samples the slowest is e" in text
        assert " scored, for " in text
    finally:
        process.kill()
        process.join()
    text = told(run, capsys)
    assert f"{run} was killed at step " in text
    assert "samples the slowest is e" in text
    assert main(["incident", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "was killed"
    assert [beat["process"] for beat in found["beats"]] == ["controller"]


def wait_for(is_so: Callable[[], object], is_running: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            if is_so():
                return
        except OSError:
            pass
        assert is_running(), "the run ended"
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.dist
def test_a_rank_that_does_not_answer_stands_first(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK.format(flag=str(tmp_path / "flag")))
    once = [
        "trainer.max_steps=500",
        "trainer.num_epochs=500",
        "run.max_restarts=0",
        "resources.call_timeout_s=20",
    ]
    settings = [*RAY, *once, "resources.ranks=2", "data.val_files=[]"]
    save_config(project.config(*settings), tmp_path / "config.yaml")
    run = tmp_path / "run"
    words = ["train", "--config", str(tmp_path / "config.yaml"), "--out", str(run)]
    with subprocess.Popen(
        [sys.executable, "-m", "strop.cli.main", *words], stderr=subprocess.DEVNULL
    ) as process:
        wait_for(
            lambda: '"kind":"step"' in (run / "events.jsonl").read_text(), lambda: process.poll() is None
        )
        stopped = worker_processes(psutil.Process(process.pid).children(recursive=True))[-1]
        stopped.send_signal(signal.SIGSTOP)
        assert process.wait(timeout=120) == 2
    text = told(run, capsys)
    assert f"{run} crashed at step " in text
    assert "have not answered within 20 s" in text or "has not answered within 20 s" in text
    first = text.partition("first the one that was silent first:\n")[2].splitlines()[0]
    assert f"pid {stopped.pid} " in first, text
    assert " s before the last one)" in first


def test_the_last_lines_of_a_long_log_are_shown(tmp_path: Path) -> None:
    (tmp_path / "main-0.log").write_text("early\n" * 300_000 + "the last words\n")
    assert _tail(tmp_path, "main-0").splitlines()[-1] == "the last words"
    (tmp_path / "main-1.log").mkdir()
    assert _tail(tmp_path, "main-1") == _tail(tmp_path, "main-2") == ""
