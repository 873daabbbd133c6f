"""A rollout worker whose engine goes on between calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.data.tiny_model import make_tiny_model
from strop.engines.config import ModelConfig
from strop.rewards import RewardConfig
from strop.rollout.config import RolloutConfig
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling
from strop.workers.async_rollout.worker import AsyncRolloutWorker
from strop.workers.rollout import RolloutSettings


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[AsyncRolloutWorker]:
    """Apart from the training role, with weights of its own."""
    make_tiny_model(tmp_path / "model", seed=0, num_layers=1)
    (tmp_path / "reward.py").write_text("def compute_score(**given):\n    return 0.0\n")
    made = AsyncRolloutWorker(
        ModelConfig(path=str(tmp_path / "model"), dtype="float32"),
        RolloutConfig(samples_per_prompt=1, max_staleness=1),
        RewardConfig(path=str(tmp_path / "reward.py"), num_workers=1),
        RolloutSettings(device="cpu", seed=0),
    )
    yield made
    made.close()


def test_it_keeps_its_memory_while_it_serves_another_worker(worker: AsyncRolloutWorker) -> None:
    """The router may give it a request of another worker just before it is told to sleep, which ended the run."""
    engine = worker._engines._generation.engine
    assert isinstance(engine, NativeEngine)

    async def begun() -> asyncio.Task[list[int]]:
        started = asyncio.Event()

        async def served() -> list[int]:
            output = await engine.generate(
                "of another worker",
                [5, 6, 7],
                Sampling(key=1, max_tokens=400),
                on_token=lambda *_: started.set(),
            )
            return list(output.token_ids)

        task = asyncio.create_task(served())
        await started.wait()
        return task

    async def ended(task: asyncio.Task[list[int]]) -> list[int]:
        return await task

    task = worker._event_loop.run(begun())
    assert worker._groups.is_idle, "it has no samples of its own"
    worker.sleep()
    assert engine._batch.held_bytes > 0
    assert worker._event_loop.run(ended(task)), "the request goes on"
    worker.sleep()
    assert engine._batch.cache_bytes == 0
