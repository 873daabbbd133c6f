"""`strop sweep`: which runs a command line asks for, and what comes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.cli.commands.sweep import _places
from strop.cli.quickstart.task import write_task
from strop.cli.sweep.grid import plan
from strop.cli.sweep.outcomes import Outcome, best_of
from strop.cli.sweep.running import Job, run_all
from strop.config.overrides import parse_override
from strop.data.tiny_model import make_tiny_model
from strop.utils.device import VISIBILITY_VARIABLES
from strop.utils.terminal import UsageError

CONFIG = """\
model: {{path: '{folder}/model'}}
data:
  train_files: ['{folder}/data/train.parquet']
  val_files: ['{folder}/data/val.parquet']
  prompts_per_step: 2
  max_prompt_tokens: 32
  max_response_tokens: 4
rollout: {{samples_per_prompt: 2}}
reward: {{num_workers: 1, path: '{folder}/reward.py'}}
trainer: {{max_steps: 2, trackers: [jsonl], preflight: false}}
run: {{save_every: 1}}
resources: {{num_threads: 1}}
"""
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ord((solution_str or " ")[0]) % 7 > 3)
"""


def test_every_combination_is_a_run_and_the_last_setting_changes_fastest() -> None:
    runs = plan(["actor.optim.lr=1e-5,1e-4", "trainer.max_steps=3", "+trainer.seed=range(1,4)"])
    assert [run.name for run in runs] == [
        "lr_1e-05__seed_1", "lr_1e-05__seed_2", "lr_1e-05__seed_3",
        "lr_0.0001__seed_1", "lr_0.0001__seed_2", "lr_0.0001__seed_3",
    ]  # fmt: skip
    assert runs[4].overrides == ("actor.optim.lr=0.0001", "trainer.max_steps=3", "+trainer.seed=2")
    assert runs[4].chosen == ("actor.optim.lr=0.0001", "+trainer.seed=2")


def test_devices_that_the_user_chose_under_any_name_are_not_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr("strop.utils.device.device_name", lambda: "cuda")
    monkeypatch.setattr("strop.utils.device.num_devices", lambda device: 2)
    for name in VISIBILITY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert [place["HIP_VISIBLE_DEVICES"] for place in _places(3)] == ["0", "1", "0"]
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "4,5")
            assert not any("HIP_VISIBLE_DEVICES" in place for place in _places(3)), name


def test_lists_quotes_and_choices_stay_whole() -> None:
    runs = plan(["data.train_files=[a.parquet],[b.parquet,c.parquet]", "reward.path=choice('x,y.py',z.py)"])
    assert [run.overrides[0] for run in runs[::2]] == [
        "data.train_files=[a.parquet]",
        "data.train_files=[b.parquet,c.parquet]",
    ]
    assert [parse_override(run.overrides[1]).value for run in runs[:2]] == ["x,y.py", "z.py"]
    assert len({run.name for run in runs}) == 4
    assert all(set(run.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.+-") for run in runs)


def test_settings_of_one_name_are_told_apart() -> None:
    names = {run.name for run in plan(["actor.optim.lr=1,2", "critic.optim.lr=1,2"])}
    assert len(names) == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trainer.seed=1"], "nothing to sweep over"),
        (["trainer.seed=1,1"], "trainer.seed=1 is asked for twice"),
        (["actor.optim.lr=interval(0,1)"], "a sweep takes lists"),
        (["trainer.seed=range(0,40)", "run.save_every=range(1,40)"], "these are 1560 runs, more than 1000"),
    ],
)
def test_what_is_no_sweep_is_said(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        plan(words)


def outcome(name: str, **numbers: Any) -> Outcome:
    return Outcome(name=name, folder=name, settings={}, **{"status": "finished", **numbers})


def test_the_best_run_has_the_highest_pass_rate_and_without_validations_the_highest_reward() -> None:
    runs = [
        outcome("a", pass_rate=0.2, reward=9.0),
        outcome("b", pass_rate=0.3),
        outcome("c", pass_rate=0.9, status="failed"),
    ]
    best = best_of(runs)
    assert best is not None
    assert best.name == "b"
    assert best_of([outcome("a", reward=0.1), outcome("b", reward=0.2), outcome("c")]) == outcome(
        "b", reward=0.2
    )
    assert best_of([outcome("a", status="stopped", pass_rate=1.0)]) is None


def test_jobs_run_so_many_at_once_in_places_of_their_own(tmp_path: Path) -> None:
    jobs = [
        Job(name=str(n), command=["--version"] if n else ["nonsense"], log=tmp_path / f"{n}.log")
        for n in range(3)
    ]
    order: list[str] = []
    run_all(
        jobs, at_once=2, places=[{"PLACE": "0"}, {"PLACE": "1"}],
        started=lambda job: order.append(f"+{job.name}"), ended=lambda job: order.append(f"-{job.name}"),
    )  # fmt: skip
    assert [job.code for job in jobs] == [2, 0, 0]
    assert order[:2] == ["+0", "+1"]
    assert order.index("+2") > min(order.index("-0"), order.index("-1"))
    assert "there is no command 'nonsense'" in (tmp_path / "0.log").read_text()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of a run of two tiny steps."""
    folder = tmp_path_factory.mktemp("sweep")
    shape = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    make_tiny_model(folder / "model", seed=0, intermediate_size=64, max_position_embeddings=128, **shape)
    write_task(folder / "data", seed=0, num_train=12, num_val=4, num_sft=8)
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder / "config.yaml"


def sweep(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "strop", "sweep", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_nothing_starts_when_one_of_the_runs_cannot_be(config: Path, tmp_path: Path) -> None:
    done = sweep("--config", config, "rollout.samples_per_prompt=2,0", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "no run was started, since rollout.samples_per_prompt=0 cannot be" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_sweep_ends_with_a_table_and_goes_on_where_it_was(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--config", config, "reward.name=compute_score,nosuch", "--out", out, "--parallel", 2, "--json"]
    done = sweep(*words)
    assert done.returncode == 1, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    good, bad = record["runs"]
    assert (good["status"], good["steps"], good["best_step"], record["best"]) == (
        "finished",
        2,
        2,
        "name_compute_score",
    )
    assert good["settings"] == {"reward.name": "compute_score"}
    assert 4 * good["pass_rate"] in range(5)  # four prompts
    assert 0.0 <= good["low"] <= good["pass_rate"] < good["high"] < 1.0
    assert good["steps_per_hour"] > 0
    assert (bad["status"], bad["pass_rate"]) == ("failed", None)
    assert "has no function 'nosuch'" in bad["reason"]
    assert Path(record["picture"]).read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "sweep.json").read_text()) == record

    before = (out / "name_compute_score" / "metrics.jsonl").stat().st_mtime_ns
    (config.parent / "reward.py").write_text(f"{REWARD}\n\ndef nosuch(*args, **kwargs):\n    return 1.0\n")
    again = sweep(*words[:-1])
    assert again.returncode == 0, again.stderr
    assert "2 runs below" in again.stderr
    assert "1 of them finished before" in again.stderr
    assert (out / "name_compute_score" / "metrics.jsonl").stat().st_mtime_ns == before
    assert "* name=nosuch" in again.stdout  # it gives every answer a point
    other = sweep(*words[:-1], "trainer.max_steps=1")
    assert "name_compute_score holds a run with other settings" in other.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_runs_and_the_same_command_goes_on(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [
        "--config",
        config,
        "trainer.max_steps=20",
        "trainer.num_epochs=99",
        "trainer.seed=1,2",
        "--out",
        out,
    ]
    words += ["run.save_every=1000"]
    command = [sys.executable, "-m", "strop", "sweep", *map(str, words)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    metrics, until = out / "seed_1" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) > 3):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    shown, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "the same command goes on where it was" in said
    assert ("stopped" in shown, "waiting" in shown) == (True, True)
    reached = [entry.name for entry in (out / "seed_1" / "checkpoints").iterdir()]
    assert reached, "it saved where it was"
    assert "continue with `strop train --resume" in (out / "logs" / "seed_1.log").read_text()
    done = sweep(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert [one["steps"] for one in json.loads(done.stdout.splitlines()[-1])["runs"]] == [20, 20]


CLUSTER = """
import sys, ray
from strop.controller.ray.cluster import Cluster
cluster = Cluster()
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
cluster.close()
"""


@pytest.mark.slow
def test_runs_share_a_cluster_of_ray_and_are_those_of_one_process(config: Path, tmp_path: Path) -> None:
    """Two runs of two ranks each at a time, in one cluster that was there before and is there afterwards."""
    words = ["--config", config, "trainer.seed=1,2,3", "trainer.max_steps=1", "--json"]
    host = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert host.stdout is not None
        address = host.stdout.readline().strip()
        ranks = [
            "resources.runtime=ray",
            f"resources.address={address}",
            "resources.ranks=2",
            "resources.cpus_per_rank=0.1",
        ]
        done = sweep(*words, *ranks, "--parallel", "2", "--out", tmp_path / "ray")
        assert done.returncode == 0, done.stdout + done.stderr
        assert host.poll() is None
    finally:
        host.communicate("", timeout=60)
    alone = sweep(*words, "--out", tmp_path / "alone")
    there, here = (json.loads(one.stdout.splitlines()[-1])["runs"] for one in (done, alone))
    assert [one["status"] for one in there] == ["finished"] * 3
    assert [one["pass_rate"] for one in there] == [one["pass_rate"] for one in here]
