"""The native engine alone, and with weights of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rollout.scripted_engine import EXPERTS, ScriptedEngine, dying, recording

from strop.engines.config import ModelConfig
from strop.rollout.config import RolloutConfig
from strop.rollout.engine_group import EngineContext, Generation
from strop.rollout.engine_setup import make_engine_group
from strop.rollout.replicas.engine_replicas import EngineReplicas
from strop.rollout.types import Sampling
from strop.trainer.standalone import client_of, load_generation


def place(folder: Path, engine: str = "native", **rollout: Any) -> EngineContext:
    return EngineContext(
        model=ModelConfig(path=str(folder), dtype="float32"),
        rollout=RolloutConfig(engine=engine, timeout_s=9, **rollout),
        device="cpu",
        version=0,
        trained=None,
        max_tokens=0,
        logs=None,
        rank=0,
    )


async def answered_alone(folder: Path) -> tuple[int, ...]:
    """What the native engine says without an actor, and without what carries weights."""
    loaded = await load_generation(place(folder))
    assert loaded.target is None
    answer = await client_of(loaded.engine, RolloutConfig()).generate(
        "a", [1, 2], Sampling(key=0, max_tokens=3)
    )
    return answer.token_ids


def test_the_native_engine_answers_alone(tiny_model: Path) -> None:
    assert len(asyncio.run(answered_alone(tiny_model))) == 3


def test_an_engine_with_weights_of_its_own_takes_versions(tiny_model: Path) -> None:
    async def body() -> None:
        served = await make_engine_group(place(tiny_model))
        await served.wake_up()
        first = await served.client.generate("a", [1, 2], Sampling(key=0, max_tokens=3))
        await served.sleep()
        await served.set_version(1)
        await served.close()
        assert served.first.target is not None, "weights of its own, as there is no policy to share"
        assert (served.first.engine.version, first.versions) == (1, (0, 0, 0))
        assert first.token_ids == await answered_alone(tiny_model)

    asyncio.run(body())


def test_replicas_lose_no_record_of_experts_that_is_replayed(tmp_path: Path) -> None:
    async def body() -> None:
        bad, good = ScriptedEngine(), ScriptedEngine(recording)
        bad.say = dying(bad, 3)
        engines = [Generation(engine=engine, policy=None, target=None) for engine in (bad, good)]
        replicas = EngineReplicas(place(tmp_path, engine="vllm", router_replay=True), engines)
        answer = await replicas.client.generate("a", [1, 2], Sampling(key=0, max_tokens=3))
        await replicas.close()
        assert (answer.token_ids, answer.routed_experts) == ((0, 1, 2), EXPERTS)

    asyncio.run(body())
