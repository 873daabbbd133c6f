"""vLLM itself over two nodes: two addresses of this machine, with a process of strop at each."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from command_lines import command_line
from test_vllm_engine import PROMPT, TOLERANCE, difference, make_model

from strop.controller.worker import Placement, placed
from strop.engines.config import ModelConfig
from strop.engines.model import weights_of_folder
from strop.rollout.types import Sampling
from strop.rollout.vllm.config import VllmConfig
from strop.rollout.vllm.engine import VllmEngine, start_vllm
from strop.rollout.vllm.follower import VllmFollower
from strop.rollout.vllm.process import VllmDied
from strop.rollout.vllm.settings import Settings
from strop.rollout.weight_sync.stream import parameter_stream

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NODES = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmFollower]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE"):
        monkeypatch.delenv(name, raising=False)  # it sets them
    with placed(Placement(node=NODES[1])):
        made = VllmFollower(VllmConfig())
    yield made
    made.close()


async def start(folder: Path, log: Path, follower: VllmFollower, config: VllmConfig) -> VllmEngine:
    settings = Settings(
        model=str(folder), dtype="float32", device="cpu", max_tokens=1100, max_running=16, num_threads=1,
        shares_device=False, log=log, nodes=NODES,
    )  # fmt: skip
    held = weights_of_folder(ModelConfig(path=str(folder)))
    return await start_vllm(config, settings, held, version=0, followers=[follower.address()])


@pytest.mark.parametrize("axis", ["tensor_parallel", "pipeline_parallel"])
def test_an_engine_over_two_nodes_gives_what_transformers_gives(
    axis: str, follower: VllmFollower, tmp_path: Path
) -> None:
    models = [make_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    config = VllmConfig(cpu_cache_gib=0.25, **{axis: 2})

    async def scenario() -> None:
        engine = await start(tmp_path / "0", tmp_path / "vllm-0.log", follower, config)
        try:
            for version, model in enumerate(models, start=1):
                for bucket in parameter_stream(model):
                    tensors = [(weight.name, tensor) for weight, tensor in bucket.tensors()]
                    await asyncio.to_thread(engine.target.load, tensors)
                await engine.set_version(version)
                output = await engine.generate("one", PROMPT, Sampling(key=3, max_tokens=20))
                assert set(output.versions) == {version}
                assert difference(model, output) < TOLERANCE
        finally:
            await engine.close()

    asyncio.run(scenario())
    assert (tmp_path / "vllm-0-node1.log").exists()


@pytest.mark.parametrize("which", [0, 1])
def test_the_end_of_a_worker_on_either_node_ends_every_wait(
    which: int, follower: VllmFollower, tmp_path: Path
) -> None:
    make_model(tmp_path / "0", seed=0)
    config = VllmConfig(cpu_cache_gib=0.25, tensor_parallel=2)

    def workers() -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [child for child in children if f"Worker_TP{which}" in command_line(child)]

    async def scenario() -> None:
        engine = await start(tmp_path / "0", tmp_path / "vllm-0.log", follower, config)
        try:
            await engine.set_version(1)
            request = asyncio.create_task(engine.generate("long", PROMPT, Sampling(key=3, max_tokens=1000)))
            await asyncio.sleep(2.0)
            (worker,) = workers()
            started = time.monotonic()
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(VllmDied):
                async with asyncio.timeout(60):
                    await request
            assert time.monotonic() - started < 30
        finally:
            await engine.close()

    asyncio.run(scenario())
