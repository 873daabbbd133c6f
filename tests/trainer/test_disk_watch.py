"""A disk that is slow, or does not answer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fork_server import run_program
from tiny_runs import Project, resume_in

from strop.config import save_config
from strop.run import RunFolder
from strop.trainer.fault_tolerance import disk
from strop.trainer.fault_tolerance.disk import watched

HANGING = """
import os, pathlib, sys
from strop.cli.main import main

write = pathlib.Path.write_text

def hang(self, *given, **named):
    if "global_step_2" in str(self.parent):
        os.mkfifo(self)  # opening it waits for a reader, as a file server that is gone is waited for
    return write(self, *given, **named)

pathlib.Path.write_text = hang
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_a_slow_write_is_said_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SLOW_S", 0.1)
    said: list[str] = []
    with RunFolder.create(tmp_path / "run", config={}, command=["strop", "train"]) as run:
        with watched(run, 3, say=said.append, limit_s=60.0):
            time.sleep(0.35)
        with watched(run, 4, say=said.append, limit_s=60.0):
            pass
        (event,) = run.events.read("slow_disk")
    assert event["step"] == 3
    assert 0.35 <= event["seconds"] < 10
    assert 2 <= len(said) <= 3
    assert "the checkpoint of step 3 has been written for 0 s: is the disk of" in said[0]


@pytest.mark.parametrize(
    ("made_by", "resumed_by"), [("train", "train"), ("replay", "train"), ("sft", "sft"), ("dpo", "prefer")]
)
def test_the_last_sentence_names_the_command_that_goes_on(
    made_by: str, resumed_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda _, text: written.append(text))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    with RunFolder.create(tmp_path / "run", config={}, command=["strop", made_by]) as run:
        disk._end(run, 3, 61.0)
    monkeypatch.undo()
    assert f"`strop {resumed_by} --resume {tmp_path / 'run'}` goes on from it" in written[0].decode()


def test_a_disk_that_does_not_answer_ends_the_run_and_it_goes_on_later(
    project: Project, tmp_path: Path
) -> None:
    """The checkpoint of step 2 cannot be written; the process is told from outside the wait."""
    settings = [
        "run.save_every=1",
        "resources.call_timeout_s=3",
        "data.val_files=[]",
        "rollout.longest_first=true",
    ]
    save_config(project.config(*settings), tmp_path / "run.yaml")
    (tmp_path / "hanging.py").write_text(HANGING)
    words = [tmp_path / "hanging.py", "--config", tmp_path / "run.yaml", "--out", tmp_path / "run"]
    begun = time.monotonic()
    done = run_program(words)
    assert done.returncode == disk.EXIT_CODE, done.stderr
    assert time.monotonic() - begun < 60
    assert "the checkpoint of step 2 could not be written within resources.call_timeout_s" in done.stderr
    assert f"`strop train --resume {tmp_path / 'run'}` goes on from it" in done.stderr
    rest = resume_in(tmp_path / "run")
    assert [one.step for one in rest.chain] == [1, 2, 3]
