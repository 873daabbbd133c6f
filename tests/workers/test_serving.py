"""Engines, processes and weights that guests bring: what is there without their folders, and what is said."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from strop.config import load_config
from strop.controller import InlineRuntime
from strop.engines.config import ModelConfig
from strop.evaluation.alone import client_of, load_generation
from strop.rollout.config import RolloutConfig
from strop.rollout.registry import engines
from strop.rollout.sync.transfer import weight_transfer
from strop.rollout.types import Sampling
from strop.trainer.config import Config
from strop.trainer.roles import start_runtime
from strop.workers.generation import Place, make_serving

MISSING = "but the part of strop for that is missing from this installation"
MINE = "one for test_serving"


@engines.register(MINE)
async def never(place: Place) -> object:
    raise AssertionError("what would make it is not there")


def place(folder: Path, engine: str = "native") -> Place:
    return Place(
        model=ModelConfig(path=str(folder), dtype="float32"),
        rollout=RolloutConfig(engine=engine, timeout_s=9),
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


@pytest.mark.usefixtures("core_alone")
def test_the_native_engine_answers_without_guests(tiny_model: Path) -> None:
    assert len(asyncio.run(answered_alone(tiny_model))) == 3


def test_an_engine_with_weights_of_its_own_takes_versions(tiny_model: Path) -> None:
    async def body() -> None:
        served = await make_serving(place(tiny_model))
        await served.wake_up()
        first = await served.client.generate("a", [1, 2], Sampling(key=0, max_tokens=3))
        await served.sleep()
        await served.set_version(1)
        await served.close()
        assert served.first.target is not None, "weights of its own, as there is no policy to share"
        assert (served.first.engine.version, first.versions) == (1, (0, 0, 0))
        assert first.token_ids == await answered_alone(tiny_model)

    asyncio.run(body())


@pytest.mark.usefixtures("core_alone")
@pytest.mark.parametrize("make", [make_serving, load_generation])
def test_without_what_asks_other_engines_they_are_refused(
    make: Callable[[Place], Awaitable[object]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"rollout.engine={MINE} is not the native one, {MISSING}"):
        asyncio.run(make(place(tmp_path, MINE)))  # type: ignore[arg-type]


@pytest.mark.usefixtures("core_alone")
def test_without_what_runs_processes_there_is_one() -> None:
    config = load_config(Config, overrides=["model.path=somewhere", "data.train_files=[a]"])
    with start_runtime(config, log_dir=None) as runtime:
        assert isinstance(runtime, InlineRuntime)
    apart = replace(config, resources=replace(config.resources, runtime="ray"))
    sentence = f"resources.runtime=ray puts the roles into processes of their own, {MISSING}"
    with pytest.raises(ValueError, match=sentence):
        start_runtime(apart, log_dir=None)
    with pytest.raises(ValueError, match=f"get their weights from the actor's, {MISSING}"):
        weight_transfer()
