"""The client of the engine in this process: its deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from rollout.scripted_engine import ScriptedEngine, output
from rollout_cases import run, tokens

from strop.engines.causal_lm import CausalLM
from strop.rollout.client import EngineClient, RolloutTimeout
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import OnToken, Sampling, TokenOutput

SAMPLING = Sampling(key=0, max_tokens=7)


def test_tokens_are_heard_and_the_answer_passes_through() -> None:
    wanted = TokenOutput(token_ids=(4,), log_probs=(-0.5,), versions=(3,), stop_reason="stop")
    heard = []

    async def say(hear: OnToken, sampling: Sampling) -> TokenOutput:
        hear(4, -0.5, 3)
        return wanted

    client = EngineClient(ScriptedEngine(say), timeout_s=5)
    assert run(client.generate("a", [1, 2], SAMPLING, on_token=lambda *one: heard.append(one))) == wanted
    assert heard == [(4, -0.5, 3)]


def test_a_request_that_generates_too_long_ends_with_what_to_do() -> None:
    async def say(hear: OnToken, sampling: Sampling) -> TokenOutput:
        hear(0, -1.0, 0)
        await asyncio.Event().wait()
        raise AssertionError

    engine = ScriptedEngine(say)
    with pytest.raises(
        RolloutTimeout,
        match=r"generation of a took longer than rollout.timeout_s = 0.05 s \(2 prompt tokens, up to 7 new ones\); "
        r"raise the limit or lower data.max_response_tokens",
    ):
        run(EngineClient(engine, timeout_s=0.05).generate("a", [1, 2], SAMPLING))
    assert engine.ended == ["a"]  # it was cancelled there


def test_later_tokens_do_not_put_the_deadline_off() -> None:
    # A token every 0.1 s of the clock, the first at 0.1: the limit is at 0.55, and the sixth would come at 0.6.
    heard = []

    async def say(hear: OnToken, sampling: Sampling) -> TokenOutput:
        for token in range(8):
            await asyncio.sleep(0.1)
            hear(token, 0.0, 0)
        return output(7)

    client = EngineClient(ScriptedEngine(say), timeout_s=0.45)
    with pytest.raises(RolloutTimeout):
        run(client.generate("a", [1], SAMPLING, on_token=lambda *one: heard.append(one[0])), stepped=True)
    assert heard == [0, 1, 2, 3, 4]


def test_waiting_for_a_turn_does_not_count() -> None:
    # Twelve requests, one after the other: the last one waits for longer than any may generate.
    async def body() -> int:
        turn = asyncio.Lock()

        async def say(hear: OnToken, sampling: Sampling) -> TokenOutput:
            async with turn:
                hear(0, 0.0, 0)
                await asyncio.sleep(0.05)
                return output(0)

        client = EngineClient(ScriptedEngine(say), timeout_s=0.4)
        return len(await asyncio.gather(*(client.generate(f"{n}", [1], SAMPLING) for n in range(12))))

    assert run(body(), stepped=True) == 12


def test_an_engines_own_timeout_is_not_taken_for_the_deadline() -> None:
    async def late(hear: OnToken, sampling: Sampling) -> TokenOutput:
        raise TimeoutError("the engine's own sentence")

    with pytest.raises(TimeoutError, match="the engine's own sentence"):
        run(EngineClient(ScriptedEngine(late), timeout_s=5).generate("a", [1], SAMPLING))


def test_the_deadline_frees_the_native_engines_slot(tiny: Callable[..., CausalLM]) -> None:
    engine = NativeEngine(tiny("qwen3", dtype="float32"), max_running=1)

    async def body() -> None:
        client = EngineClient(engine, timeout_s=0.1)
        pauses = []

        def hold(token: int, log_prob: float, version: int) -> None:
            pauses.append(asyncio.create_task(engine.pause()))

        with pytest.raises(RolloutTimeout, match="generation of a took longer"):
            await client.generate("a", tokens(4, 0), SAMPLING, on_token=hold)
        await engine.resume()
        numbers = await engine.health()
        assert (numbers["running"], numbers["waiting"]) == (0, 0)

    run(body())
