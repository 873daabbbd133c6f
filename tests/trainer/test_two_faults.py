"""Two faults in one moment: a replica of the engine dies and a scorer hangs while new weights arrive."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
from command_lines import command_line
from learning_task import LearningTask
from test_ahead_runs import trained
from tiny_runs import check_records, train_in

from strop.run import RunFolder
from strop.trainer.remote_weight_sync import RemoteWeightSync

pytestmark = pytest.mark.slow

ROLLOUT = Path(__file__).parents[1] / "rollout"
SETTINGS = (
    "rollout.engine=sglang", "rollout.replicas=2", "rollout.max_staleness=1", "rollout.max_running=12",
    "data.prompts_per_step=4", "rollout.samples_per_prompt=4", "trainer.max_steps=4", "data.val_files=[]",
    "reward.timeout_s=2", "reward.max_failed_share=1", "algorithm.correction.weights=token",
)  # fmt: skip
REWARD = """
import contextlib, os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    for _ in range(4):
        time.sleep(0.03)
        with contextlib.suppress(FileNotFoundError):
            os.unlink({flag!r})
            time.sleep(600)
    return float(solution_str.strip() == ground_truth)
"""
"""Whoever scores when there is a flag takes it, and hangs."""


def servers() -> list[psutil.Process]:
    """The replicas, as processes."""
    family = psutil.Process().children(recursive=True)
    return [one for one in family if "sglang/inside" in command_line(one)]


def test_a_replica_is_lost_while_scoring_hangs_and_weights_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    root = f"{ROLLOUT / 'sglang_server'}:{ROLLOUT.parents[1]}"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{root}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    send, hit = RemoteWeightSync._send, list[int]()

    def disturbed(self: RemoteWeightSync) -> None:
        if self.version == 2 and not hit:
            (tmp_path / "flag").touch()
            hit.append(servers()[0].pid)
            os.kill(hit[0], signal.SIGKILL)
        send(self)

    monkeypatch.setattr(RemoteWeightSync, "_send", disturbed)
    task = LearningTask(tmp_path / "task")
    (tmp_path / "reward.py").write_text(REWARD.format(flag=str(tmp_path / "flag")))
    own = [f"rollout.sglang.python={python}", f"reward.path='{tmp_path / 'reward.py'}'"]
    done = train_in(tmp_path / "run", task.config(None, *SETTINGS, *own))
    assert hit
    check_records(done.folder, num_steps=4)
    with RunFolder.open(done.folder, read_only=True) as run:
        counts = run.ledger.counts()
        lost = run.events.read("engine_lost")
        rows = [row for step in run.samples.steps() for row in run.samples.read(step)]
    assert counts["issued"] == 4 * 16
    assert counts["trained"] + counts["failed"] == counts["issued"]
    assert max(trained(done.folder).values()) == 1
    assert Counter(row["outcome"] for row in rows).keys() == {"score", "timeout"}, "a scorer hung, once"
    assert {row["outcome"] for row in rows if row["fate"] == "failed"} <= {"timeout"}
    assert [event["message"] for event in lost] == [
        "rollout engine 0 was lost and started again, at version 2"
    ]
    assert not psutil.pid_exists(hit[0]), "nothing is left of it"
