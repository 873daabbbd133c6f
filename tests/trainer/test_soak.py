"""A long run of tiny steps under faults: scorers crash, hang and talk nonsense, and the run is killed and resumed.

`make soak` does 2,000 steps; STROP_SOAK says another number.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_ahead_runs import trained
from tiny_runs import Project, check_records

from strop.config import save_config
from strop.run import RunFolder

NUM_STEPS = int(os.environ.get("STROP_SOAK", "150"))
MAX_GROWTH = 64 * 2**20
"""Bytes that the controller may grow by over the last part of the run, whose log grows too."""
REWARD = """
import os, random, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    luck = random.SystemRandom().random()
    if luck < 0.004:
        os._exit(3)
    if luck < 0.006:
        time.sleep(600)
    if luck < 0.012:
        raise ConnectionResetError("again")
    if luck < 0.016:
        return float("nan")
    return ord((solution_str or " ")[0]) % 8 / 10
"""
SETTINGS = [
    "rollout.max_staleness=1",
    "algorithm.correction.weights=token",
    "data.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "reward.num_workers=2",
    "reward.timeout_s=1",
    "reward.max_failed_share=1",
    "reward.on_failure.infrastructure=retry",
    "trainer.num_epochs=1000000",
    f"trainer.max_steps={NUM_STEPS}",
    "data.val_files=[]",
    "run.save_every=10",
    "run.hf_model=never",
]


def start(folder: Path, *words: object) -> subprocess.Popen[bytes]:
    """A process of `strop train` that writes what it says into a file: a pipe would be full before the end."""
    with (folder / "said.log").open("ab") as said:
        command = [sys.executable, "-m", "strop.cli.main", "train", *map(str, words)]
        return subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"})


def disturb(process: subprocess.Popen[bytes], folder: Path, rng: random.Random, *, until: int) -> set[int]:
    """Kill or stop scorers now and then, then the run itself after so many steps; all processes that were seen."""
    seen: set[int] = set()
    while process.poll() is None and num_steps(folder) < until:
        time.sleep(0.2)
        with contextlib.suppress(psutil.Error):
            scorers = psutil.Process(process.pid).children(recursive=True)
            seen |= {one.pid for one in scorers}
            if scorers and rng.random() < 0.03:
                rng.choice(scorers).send_signal(rng.choice([signal.SIGKILL, signal.SIGSTOP]))
    return seen


def num_steps(folder: Path) -> int:
    try:
        return (folder / "events.jsonl").read_text().count('"kind":"step"')
    except OSError:
        return 0


@pytest.mark.slow
@pytest.mark.timeout(300 + 3 * NUM_STEPS)
def test_a_long_run_under_faults_keeps_its_books_its_memory_and_leaves_nothing_behind(
    project: Project, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    config = project.config(*SETTINGS, f"reward.path='{tmp_path / 'reward.py'}'")
    save_config(config, tmp_path / "run.yaml")
    rng, folder, seen = random.Random(14), tmp_path / "run", set[int]()
    words: tuple[object, ...] = ("--config", tmp_path / "run.yaml", "--out", folder)
    for part in (1, 2, 3):  # killed three times in the first half
        with start(tmp_path, *words) as process:
            seen |= {process.pid} | disturb(process, folder, rng, until=NUM_STEPS * part // 6)
            assert process.poll() is None, (tmp_path / "said.log").read_text()[-4000:]
            process.send_signal(signal.SIGKILL)
        words = ("--resume", folder)
    with start(tmp_path, *words) as process:
        seen |= {process.pid} | disturb(process, folder, rng, until=num_steps(folder) + NUM_STEPS // 6)
        assert process.poll() is None, (tmp_path / "said.log").read_text()[-4000:]
        before = after = psutil.Process(process.pid).memory_info().rss
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                after = psutil.Process(process.pid).memory_info().rss or after
                seen |= {one.pid for one in psutil.Process(process.pid).children(recursive=True)}
            time.sleep(0.2)
    assert process.returncode == 0, (tmp_path / "said.log").read_text()[-4000:]
    assert after - before < MAX_GROWTH, (before, after)
    check_records(folder, num_steps=NUM_STEPS)
    assert max(trained(folder).values()) == 1, "nothing twice"
    with RunFolder.open(folder, read_only=True) as run:
        counts = run.ledger.counts()
        assert len(run.events.read("resumed")) == 3
    assert counts["issued"] == 4 * NUM_STEPS
    assert counts["in_flight"] == 0
    left = [
        pid for pid in seen if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]
    assert not left
