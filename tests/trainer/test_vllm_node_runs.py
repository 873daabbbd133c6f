"""Training with one engine of vLLM over two Ray nodes of this machine, of which something is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import Project, check_records

from strop.config import save_config
from strop.data.tiny_model import make_tiny_model
from strop.run import RunFolder

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SCRIPT = """
import json, os, signal, sys, threading, time
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster

from strop.config import load_config
from strop.trainer.config import Config
from strop.trainer.train import train
from strop.trainer.start import start_run

run, target = Path(sys.argv[2]), sys.argv[3]
sizes = {"num_cpus": 1, "object_store_memory": 80_000_000}
nodes = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
addresses = ["127.0.0.2", "127.0.0.3"]
for address in addresses:
    nodes.add_node(node_ip_address=address, **sizes)
config = load_config(Config, source=sys.argv[1], overrides=[f"resources.address='{nodes.address}'"])


def processes_of_run():
    for process in psutil.process_iter():
        try:
            if process.environ().get("RUN_OF_TEST") == str(os.getppid()):
                yield process, " ".join(process.cmdline())
        except psutil.Error:
            continue


def kill_one():
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        time.sleep(0.1)
    found = {name: process for process, name in processes_of_run()}
    if target == "worker":  # vLLM's, on the further node
        (victim,) = [process for name, process in found.items() if "Worker_TP1" in name]
    else:  # strop's, which has started the part there
        (victim,) = {process.ppid(): process.parent() for name, process in found.items() if "headless.py" in name
                     and process.pid == os.getpgid(process.pid)}.values()
    print(json.dumps({"killed": " ".join(victim.cmdline())}), flush=True)
    os.kill(victim.pid, signal.SIGKILL)


threading.Thread(target=kill_one, daemon=True).start()
with start_run(run, config, command=["strop", "train"]).run as folder:
    train(config, folder, say=lambda line: print(line, file=sys.stderr, flush=True))
nodes.shutdown()
"""


@pytest.mark.parametrize("target", ["worker", "follower"])
def test_an_engine_over_two_nodes_trains_and_is_replaced_whole(
    target: str, project: Project, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "model", seed=0, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
                    head_dim=32, intermediate_size=96, max_position_embeddings=512)  # fmt: skip
    config = project.config(
        f"model.path='{tmp_path / 'model'}'", "data.val_files=[]", "trainer.max_steps=6", "trainer.num_epochs=10",
        "rollout.engine=vllm", "rollout.vllm.cpu_cache_gib=0.25", "rollout.vllm.tensor_parallel=2",
        "resources.runtime=ray", "resources.apart={rollout: 1}", "actor.optim.lr=1e-2",
        f"resources.env={{RUN_OF_TEST: {os.getpid()}}}", "resources.start_timeout_s=600",
    )  # fmt: skip
    save_config(config, tmp_path / "config.yaml")
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [str(tmp_path / "script.py"), str(tmp_path / "config.yaml"), str(tmp_path / "run"), target]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=850, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert '{"killed": ' in done.stdout
    run_folder = tmp_path / "run"
    check_records(run_folder, num_steps=6)
    with RunFolder.open(run_folder, read_only=True) as run:
        lost, restarted = list(run.events.read("engine_lost")), list(run.events.read("restarted"))
    if target == "worker":
        assert [event["message"].partition(" again")[0] for event in lost] == [
            "rollout engine 0 was lost and started"
        ]
        assert not restarted
    else:
        (event,) = restarted
        assert "rollout rank 0" in event["cause"]
    steps = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert max(step.get("training/rollout_probs_diff_max", 0.0) for step in steps) < 1e-4
    logs = {path.name for path in run_folder.rglob("vllm-0*.log")}
    assert logs == {"vllm-0.log", "vllm-0-node1.log"}
