"""The stand-in for engines in other processes keeps the contract, and weights arrive there."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from rollout.engine_contract.case import EngineCase, Rule, StartedEngine
from rollout.engine_contract.native import native
from rollout.engine_contract.rules import RULES
from rollout.engine_process.engine import RemoteEngine
from rollout.engine_process.server import EngineServer
from rollout_cases import run, tokens, turns

from strop.engines.causal_lm import CausalLM
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.types import UnverifiedWeights
from strop.rollout.weight_sync.verified_engine import VerifiedEngine

SAMPLING = Sampling(key=3, max_tokens=6)


class Served(RemoteEngine):
    """A remote engine whose server runs on the same loop, and ends with it."""

    stack: AsyncExitStack

    async def close(self) -> None:
        await super().close()
        await self.stack.aclose()


async def served(folder: Path) -> StartedEngine:
    """Starts a native engine behind a connection."""
    started = await native()(folder)
    stack = AsyncExitStack()
    server = await stack.enter_async_context(EngineServer(started.engine))
    engine = await Served.connect(server.address)
    assert isinstance(engine, Served)
    engine.stack = stack
    return dataclasses.replace(started, engine=engine)


@pytest.fixture(scope="module")
def case(tiny_folder: Callable[[str], Path]) -> Iterator[EngineCase]:
    with EngineCase(served, tiny_folder("qwen3")) as case:
        yield case


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_remote_engine(case: EngineCase, rule: Rule) -> None:
    case.check(rule)


@pytest.fixture
def engine(tiny: Callable[..., CausalLM]) -> NativeEngine:
    return NativeEngine(tiny("qwen3", dtype="float32"), max_running=4, version=2)


def test_the_answer_is_that_of_the_served_engine(engine: NativeEngine) -> None:
    async def body() -> None:
        wanted = await engine.generate("x", tokens(5, 1), SAMPLING)
        await engine.flush_cache()  # what is reused of a prompt differs by rounding
        async with EngineServer(engine) as server:
            remote = await RemoteEngine.connect(server.address)
            assert (remote.version, remote.abilities) == (2, engine.abilities)
            assert await remote.generate("x", tokens(5, 1), SAMPLING) == wanted
            await remote.set_version(3)
            assert remote.version == engine.version == 3
            with pytest.raises(ValueError, match="version 1 was set after version 3; versions only grow"):
                await remote.set_version(1)
            await remote.close()

    run(body())


def test_requests_end_with_the_connection(engine: NativeEngine) -> None:
    async def body() -> None:
        async with EngineServer(engine) as server:
            remote = await RemoteEngine.connect(server.address)
            heard: list[int] = []
            long = Sampling(key=1, max_tokens=50)
            task = asyncio.create_task(
                remote.generate("x", tokens(5, 1), long, on_token=lambda token, *_: heard.append(token))
            )
            while not heard:
                await asyncio.sleep(0.001)
            await remote.close()
            with pytest.raises(ConnectionError, match="is not reached: the engine was closed"):
                await task
            async with asyncio.timeout(5):
                while (await engine.health())["running"]:
                    await asyncio.sleep(0.001)

    run(body())


def test_a_connection_that_ended_is_made_anew(engine: NativeEngine) -> None:
    async def body() -> None:
        async with EngineServer(engine) as server:
            remote = await RemoteEngine.connect(server.address)
            assert remote._connection is not None
            remote._connection._wire.close()
            await turns(5)
            assert (await remote.health())["version"] == 2
            await remote.close()
        with pytest.raises(ConnectionError, match="was closed"):
            await remote.health()
        gone = RemoteEngine(server.address)
        with pytest.raises(ConnectionError, match=f"127.0.0.1:{server.address.port} is not reached"):
            await gone.health()

    run(body())


def test_weights_arrive_at_a_served_engine(tiny: Callable[..., CausalLM]) -> None:
    trained, copy = tiny("qwen3", dtype="float32"), tiny("qwen3", dtype="float32")
    with torch.no_grad():
        for _, parameter in trained.named_parameters():
            parameter.mul_(-0.7)
    sampling = Sampling(key=0, temperature=0.0, max_tokens=8)

    async def body() -> tuple[TokenOutput, TokenOutput]:
        receiver = WeightReceiver(ModuleTarget(copy.module), timeout_s=20.0)
        verified = VerifiedEngine(NativeEngine(copy, max_running=2), receiver)
        sender = WeightSender(trained.module, timeout_s=20.0)
        async with EngineServer(verified) as server:
            remote = await RemoteEngine.connect(server.address)
            with pytest.raises(UnverifiedWeights, match="no weights have arrived yet"):
                await remote.generate("x", [1, 2], sampling)
            endpoint = sender.open(num_receivers=1)
            assert endpoint is not None
            await remote.join(endpoint, index=0)
            sent, received = await asyncio.gather(asyncio.to_thread(sender.send, 4), remote.update_weights(4))
            assert (received.version, received.digest) == (4, sent.digest)
            output = await remote.generate("x", [1, 2], sampling)
            assert (remote.version, set(output.versions)) == (4, {4})
            await remote.close()
        sender.close()
        receiver.close()
        return output, await NativeEngine(trained, max_running=2, version=4).generate("x", [1, 2], sampling)

    output, wanted = run(body())
    assert output == wanted
