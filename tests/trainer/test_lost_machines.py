"""A machine of a Ray cluster that is lost while a run uses it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_ahead_runs import AHEAD, FEW, trained
from test_ray_runs import RAY
from tiny_runs import Project, check_records, train_in

from strop.config import save_config
from strop.observability.trackers.setup import read_metrics
from strop.run import RunFolder

SCRIPT = """
import subprocess, sys, threading, time
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster

from strop.cli.main import main

folder, config, num_machines = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
others = [machines.add_node(num_cpus=2, node_ip_address=f"127.0.0.{n + 2}") for n in range(num_machines)]


def works(machine):
    raylet = psutil.Process(machine.all_processes["raylet"][0].process.pid)
    names = [" ".join(one.cmdline()) for one in raylet.children(recursive=True)]
    return any(name.startswith("ray::") and "IDLE" not in name for name in names)


def wait_for_checkpoints(count):
    while len(list(folder.glob("checkpoints/global_step_*/manifest.json"))) < count:
        time.sleep(0.02)


def lose_one():
    wait_for_checkpoints(2)
    machines.remove_node(next(one for one in others if works(one)), allow_graceful=False)
    if len(sys.argv) > 4:
        wait_for_checkpoints(int(sys.argv[4]))
        added.append(subprocess.Popen([
            sys.executable, "-m", "ray.scripts.scripts", "start", "--address", machines.address, "--num-cpus=2",
            "--node-ip-address=127.0.0.9", "--object-store-memory=100000000", "--block",
        ]))


added = []
threading.Thread(target=lose_one, daemon=True).start()
code = main(["train", "--config", config, "--out", str(folder), f"resources.address={machines.address}"])
for one in added:
    one.terminate()
    one.wait(20)
machines.shutdown()
sys.exit(code)
"""


def run_that_loses_a_machine(
    project: Project, tmp_path: Path, *, num_machines: int
) -> subprocess.CompletedProcess[str]:
    apart = [
        "resources.apart={rollout: 1}",
        "resources.start_timeout_s=60",
        "run.save_every=1",
        "run.keep_last=9",
    ]
    config = project.config(*AHEAD, *FEW, *RAY, *apart, "resources.cpus_per_rank=1", "data.val_files=[]")
    save_config(config, tmp_path / "run.yaml")
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [tmp_path / "script.py", tmp_path / "run", tmp_path / "run.yaml", num_machines]
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.dist
def test_the_run_goes_on_on_those_that_are_left(project: Project, tmp_path: Path) -> None:
    done = run_that_loses_a_machine(project, tmp_path, num_machines=2)
    assert done.returncode == 0, done.stdout + done.stderr
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        assert len(run.events.read("restarted")) == 1
    check_records(tmp_path / "run", num_steps=5)
    assert set(trained(tmp_path / "run").values()) == {1}


@pytest.mark.dist
def test_where_too_few_are_left_it_ends_in_time_and_says_so(project: Project, tmp_path: Path) -> None:
    begun = time.monotonic()
    done = run_that_loses_a_machine(project, tmp_path, num_machines=1)
    assert done.returncode not in (0, -9), done.stdout + done.stderr
    assert time.monotonic() - begun < 200
    assert "the places of pool 'main' (1 x 1 CPU) were not free within 60 s" in done.stderr
    assert f"`strop train --resume {tmp_path / 'run'}` goes on from the last checkpoint" in done.stderr


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_a_run_has_fewer_ranks_while_a_machine_is_lost_and_more_again(
    project: Project, tmp_path: Path
) -> None:
    """Its steps are those of one process, in the same order, whatever the number of ranks."""
    common = (
        "model.dtype=float64", "resources.num_threads=1", "trainer.num_epochs=20", "trainer.max_steps=60",
        "run.save_every=1", "run.keep_last=60", "data.val_files=[]",
    )  # fmt: skip
    alone = train_in(tmp_path / "alone", project.config(*common))
    config = project.config(
        *common, "resources.runtime=ray", "resources.ranks=2", "resources.nodes=2", "resources.min_nodes=1",
        "resources.start_timeout_s=60", "resources.cpus_per_rank=1",
    )  # fmt: skip
    save_config(config, tmp_path / "run.yaml")
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [tmp_path / "script.py", tmp_path / "run", tmp_path / "run.yaml", 2, 3]
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        causes = [event["cause"] for event in run.events.read("restarted")]
        steps = read_metrics(run.path / "metrics.jsonl")
    assert "1 of 2 machines: 1 ranks; the run takes more at a checkpoint once there are" in done.stderr
    assert causes[-1] == "2 machines are there, and the run uses 1"
    check_records(tmp_path / "run", num_steps=60)
    names = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean")
    ours = {step["step"]: [step[name] for name in names] for step in steps if names[0] in step}
    expected = {step["step"]: [step[name] for name in names] for step in alone.steps}
    assert ours.keys() == expected.keys()
    for step, values in expected.items():
        assert ours[step] == pytest.approx(values, abs=1e-7, rel=1e-7), step
