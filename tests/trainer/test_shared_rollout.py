"""Four rollout workers on two Ray nodes of this machine, whose shares of a step differ a lot in their work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import Project

from strop.config import save_config
from strop.data.tiny_model import make_tiny_model
from strop.trainer import worker_groups
from strop.trainer.worker_groups import rollout_settings

LONG, SHORT = 900, 4
AGENT = f'''
from strop.agents import agents


@agents.register("uneven")
async def uneven(prompt, trajectory, generate):
    """Goes on to a number of tokens that the row says, over as many requests as that takes."""
    wanted = {LONG} if prompt.row < 4 else {SHORT}
    while wanted > 0:
        output = await generate(trajectory.token_ids, max_tokens=min(wanted, 150))
        trajectory = trajectory.with_sampled(output.token_ids, output.log_probs, output.versions)
        wanted -= len(output.token_ids)
    return trajectory.finish("length")
'''

SCRIPT = """
import json, sys
from dataclasses import replace

from ray.cluster_utils import Cluster

from strop.config import load_config
from strop.controller import InlineRuntime
from strop.rollout.routing.router import Router
from strop.trainer.config import Config
from strop.trainer.ray_runtime import make_runtime
from strop.trainer.setup import load_training_data, sampling_of
from strop.trainer.worker_groups import make_worker_groups, rollout_settings

config = load_config(Config, source=sys.argv[1])
data = load_training_data(config)
prompts = [data.train.prompt(row, f"1-0-{row}") for row in range(16)]
sampling = sampling_of(config, config.rollout, data.tokenizer)


def played(roles):
    batch = roles.run_episodes(prompts, 2, sampling)
    episodes = batch.rows.get().non_tensor_batch["episode"]
    return {episode.id: list(episode.trajectory.token_ids) for episode in episodes}


def tell(name, **numbers):
    print(json.dumps({"name": name, **numbers}), flush=True)


with InlineRuntime() as runtime:
    roles = make_worker_groups(config, runtime, rollout_settings(config), num_steps=1)
    tell("one worker", tokens=played(roles))

nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
nodes.add_node(num_cpus=2, node_ip_address="127.0.0.2")
resources = replace(
    config.resources, runtime="ray", ranks=4, nodes=2, address=nodes.address, cpus_per_rank=0.5
)
config = replace(config, resources=resources)
with make_runtime(resources, log_dir=None) as runtime:
    roles = make_worker_groups(config, runtime, rollout_settings(config), num_steps=1)
    assert roles.router is not None
    for name, patience_s in (("fixed", 1e9), ("shared", 0.3)):
        router = Router(runtime.address, patience_s=patience_s)
        runtime.on_close(router.close)
        roles.rollout.call.join_router(router.address)
        tokens = played(roles)
        stats = router.take_stats()
        on = sorted({member.node.address for member in roles.rollout.members})
        tell(name, tokens=tokens, idle=stats.idle_share, taken=stats.num_taken_over, on=on, seconds=stats.serving_s / 4)
nodes.shutdown()
"""


@pytest.mark.dist
@pytest.mark.slow
def test_four_workers_on_two_nodes_idle_less_and_sample_what_one_does(
    project: Project, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "model", seed=0, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
                    head_dim=16, intermediate_size=48, max_position_embeddings=1024)  # fmt: skip
    (tmp_path / "agent.py").write_text(AGENT)
    config = project.config(
        f"model.path='{tmp_path / 'model'}'", "data.max_response_tokens=950", "data.val_files=[]",
        f"agent.files=['{tmp_path / 'agent.py'}']", "agent.default_agent=uneven",
        "actor.engine.max_tokens_per_device=4096",
    )  # fmt: skip
    save_config(config, tmp_path / "config.yaml")
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "config.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    said: dict[str, Any] = {line.pop("name"): line for line in lines}
    one, fixed, shared = said["one worker"], said["fixed"], said["shared"]
    print(
        {name: {key: value for key, value in line.items() if key != "tokens"} for name, line in said.items()}
    )
    assert len(shared["on"]) == 2
    assert fixed["taken"] == 0 < shared["taken"]
    assert shared["idle"] < fixed["idle"] - 0.2
    assert list(one["tokens"]) == list(shared["tokens"]), "rows in the order of the prompts"
    assert one["tokens"] == fixed["tokens"] == shared["tokens"]


@pytest.mark.parametrize(
    ("settings", "world_size", "address", "is_routed"),
    [
        ([], 2, "127.0.0.1", True),
        ([], 1, "127.0.0.1", False),
        ([], 2, "", False),
        (["rollout.load_balance=false"], 2, "127.0.0.1", False),
        (["rollout.over_issue=0.5"], 2, "127.0.0.1", False),
        (["rollout.router_replay=true"], 2, "127.0.0.1", True),
        (["rollout.max_staleness=1", "resources.apart={rollout: 2}"], 2, "127.0.0.1", True),
    ],
)
def test_a_router_is_there_where_workers_can_serve_each_other(
    project: Project, settings: list[str], world_size: int, address: str, is_routed: bool
) -> None:
    joined: list[object] = []
    closers: list[Callable[[], None]] = []
    rollout: Any = SimpleNamespace(world_size=world_size, call=SimpleNamespace(join_router=joined.append))
    runtime: Any = SimpleNamespace(address=address, on_close=closers.append)
    config = project.config(*settings, "resources.runtime=ray")
    router = worker_groups._router(config, runtime, rollout, rollout_settings(config))
    assert (router is not None) == is_routed == bool(joined)
    for close in closers:
        close()
