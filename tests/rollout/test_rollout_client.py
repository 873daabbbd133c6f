"""The client: deadlines, routing, engines that are lost; and the checks of options."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Mapping

import pytest
from rollout.scripted_engine import EXPERTS, ScriptedEngine, counting, dying, output, recording
from rollout_cases import run, tokens, turns

from strop.engines.causal_lm import CausalLM
from strop.rollout.client import NoEngine, RolloutTimeout
from strop.rollout.config import RolloutConfig
from strop.rollout.native.engine import NativeEngine
from strop.rollout.replicas.client import RolloutClient
from strop.rollout.replicas.router import FIRST_LIMIT, Replica
from strop.rollout.types import OnToken, RolloutEngine, Sampling, TokenOutput

SAMPLING = Sampling(key=0, max_tokens=7)


def balanced(client: RolloutClient) -> tuple[int, int, int]:
    """Completed, failed and cancelled requests, of which none is open."""
    counts = client.counts
    assert counts.open == 0
    return counts.completed, counts.failed, counts.cancelled


def test_an_answer_passes_through() -> None:
    wanted = TokenOutput(token_ids=(1,), log_probs=(-0.5,), versions=(3,), stop_reason="stop")

    async def say(hear: OnToken, sampling: Sampling) -> TokenOutput:
        return wanted

    engine: RolloutEngine = ScriptedEngine(say)
    client = RolloutClient([engine], timeout_s=5)
    assert run(client.generate("a", [1, 2], SAMPLING)) == wanted
    assert balanced(client) == (1, 0, 0)


def test_a_request_that_generates_too_long_ends_with_what_to_do() -> None:
    async def say(hear: OnToken, sampling: Sampling) -> TokenOutput:
        hear(0, -1.0, 0)
        await asyncio.Event().wait()
        raise AssertionError

    engine = ScriptedEngine(say)
    client = RolloutClient([engine], timeout_s=0.05)
    with pytest.raises(
        RolloutTimeout,
        match=r"generation of a took longer than rollout.timeout_s = 0.05 s \(2 prompt tokens, up to 7 new ones\); "
        r"raise the limit or lower data.max_response_tokens",
    ):
        run(client.generate("a", [1, 2], SAMPLING))
    assert engine.ended == ["a"]  # it was cancelled there
    assert balanced(client) == (0, 1, 0)


def test_waiting_for_a_turn_does_not_count() -> None:
    # Twelve requests, one after the other: the last one waits for longer than any may generate.
    async def body() -> None:
        turn = asyncio.Lock()

        async def say(hear: OnToken, sampling: Sampling) -> TokenOutput:
            async with turn:
                hear(0, 0.0, 0)
                await asyncio.sleep(0.05)
                return output(0)

        client = RolloutClient([ScriptedEngine(say)], timeout_s=0.4)
        await asyncio.gather(*(client.generate(f"{n}", [1], SAMPLING) for n in range(12)))
        assert balanced(client) == (12, 0, 0)

    run(body(), stepped=True)


def test_a_wait_ends_when_the_engine_begins_nothing() -> None:
    engine = ScriptedEngine()
    client = RolloutClient([engine], timeout_s=0.05)
    with pytest.raises(
        RolloutTimeout,
        match="engine 0 lives, but has begun none of its 1 requests and ended none for rollout.timeout_s = 0.05 s",
    ):
        run(client.generate("a", [1], SAMPLING))
    assert engine.num_probes == 1


def test_a_pause_is_no_wait_in_vain(tiny: Callable[..., CausalLM]) -> None:
    engine = NativeEngine(tiny("qwen3", dtype="float32"), max_running=1)

    async def body() -> None:
        client = RolloutClient([engine], timeout_s=0.4)
        await engine.generate("first", tokens(4, 0), SAMPLING)  # compiles, reserves and so on
        await engine.pause()
        task = asyncio.create_task(client.generate("a", tokens(4, 0), SAMPLING))
        await asyncio.sleep(0.8)
        assert not task.done()
        await engine.resume()
        assert len((await task).token_ids) == 7

    run(body())


def test_an_engines_own_timeout_is_not_taken_for_the_deadline() -> None:
    async def late(hear: OnToken, sampling: Sampling) -> TokenOutput:
        raise TimeoutError("the engine's own sentence")

    with pytest.raises(TimeoutError, match="the engine's own sentence"):
        run(RolloutClient([ScriptedEngine(late)], timeout_s=5).generate("a", [1], SAMPLING))


def test_a_cancelled_caller_counts_as_that() -> None:
    async def body() -> None:
        engine = ScriptedEngine()
        client = RolloutClient([engine], timeout_s=5)
        task = asyncio.create_task(client.generate("a", [1], SAMPLING))
        await turns(3)
        task.cancel()
        await asyncio.wait([task])
        assert engine.ended == ["a"]
        assert balanced(client) == (0, 0, 1)
        assert len(asyncio.all_tasks()) == 1  # the clock stands still

    run(body())


def test_requests_go_to_the_engine_with_the_fewest_and_episodes_stay() -> None:
    async def body() -> None:
        engines = [ScriptedEngine(), ScriptedEngine(), ScriptedEngine()]
        client = RolloutClient(engines, timeout_s=5)
        names = [f"p{n}/0#0" for n in range(6)]
        tasks = [asyncio.create_task(client.generate(name, [1], SAMPLING)) for name in names]
        await turns(4)
        assert [len(one.asked) for one in engines] == [2, 2, 2]
        for engine in engines:
            engine.say = counting
        for task in tasks[1:]:
            task.cancel()
        tasks.append(asyncio.create_task(client.generate("p0/0#1", [1], SAMPLING)))  # busy with the first
        await asyncio.wait(tasks[1:])
        assert engines[0].asked[-1][0] == "p0/0#1"
        tasks[0].cancel()

    run(body())


@pytest.mark.parametrize(
    ("numbers", "given"),
    [
        ({"running": 32.0, "waiting": 0.0}, 64),  # it took all at once: twice as many
        ({"running": 16.0, "waiting": 16.0}, 18),  # it runs 16; an eighth more waits there
        ({}, None),  # it says nothing: all it is asked
    ],
)
def test_an_engine_says_how_much_it_takes(numbers: dict[str, float], given: int | None) -> None:
    replica = Replica(0, ScriptedEngine(), FIRST_LIMIT, num_given=FIRST_LIMIT)
    replica.learn(numbers, 0.0)
    assert replica.limit == (math.inf if given is None else given)


def test_a_lost_request_goes_on_elsewhere_behind_what_was_heard() -> None:
    bad, good = ScriptedEngine(), ScriptedEngine(counting)
    bad.say = dying(bad, 3)
    heard: list[int] = []
    client = RolloutClient([bad, good], timeout_s=5)
    sampling = Sampling(key=5, max_tokens=7, position=2)
    got = run(client.generate("p/0#0", [9, 9], sampling, on_token=lambda token, *_: heard.append(token)))
    assert got == output(2, 3, 4, 5, 6, 7, 8)
    assert heard == [2, 3, 4, 5, 6, 7, 8]
    ((name, prompt, rest),) = good.asked
    assert (name, prompt) == ("p/0#0~1", (9, 9, 2, 3, 4))
    assert (rest.key, rest.position, rest.max_tokens) == (5, 5, 4)
    assert balanced(client) == (1, 0, 0)
    assert client.counts.reissued == 1


@pytest.mark.parametrize(("stop", "reason"), [((), "length"), ((1,), "stop")])
def test_nothing_is_asked_again_when_only_the_end_was_lost(stop: tuple[int, ...], reason: str) -> None:
    bad, good = ScriptedEngine(), ScriptedEngine(counting)
    bad.say = dying(bad, 2)
    sampling = Sampling(key=5, max_tokens=2 + len(stop), stop_token_ids=stop)
    got = run(RolloutClient([bad, good], timeout_s=5).generate("a", [9], sampling))
    assert (got.token_ids, got.stop_reason, good.asked) == ((0, 1), reason, [])


@pytest.mark.parametrize(("stop", "reason"), [((), "length"), ((1,), "stop")])
def test_a_request_that_lost_its_record_of_experts_alone_is_read_for_it(
    stop: tuple[int, ...], reason: str
) -> None:
    # The engine reads 9 and token 0, as the policy will; what it samples behind them is thrown away.
    bad, good = ScriptedEngine(), ScriptedEngine(recording)
    bad.say = dying(bad, 2)
    heard: list[int] = []
    client = RolloutClient([bad, good], timeout_s=5, records_routing=True)
    sampling = Sampling(key=5, max_tokens=2 + len(stop), stop_token_ids=stop)
    got = run(client.generate("a", [9], sampling, on_token=lambda token, *_: heard.append(token)))
    assert got == dataclasses.replace(output(0, 1, stop_reason=reason), routed_experts=EXPERTS)
    assert heard == [0, 1]
    ((name, prompt, rest),) = good.asked
    assert (name, prompt, rest.max_tokens) == ("a~1", (9, 0), 1)


def test_a_request_that_lost_its_tokens_goes_on_with_the_record_of_the_engine_that_read_them() -> None:
    bad, good = ScriptedEngine(), ScriptedEngine(recording)
    bad.say = dying(bad, 2)
    client = RolloutClient([bad, good], timeout_s=5, records_routing=True)
    got = run(client.generate("a", [9], SAMPLING))
    assert got == dataclasses.replace(output(*range(7)), routed_experts=EXPERTS)


def test_without_a_record_of_experts_a_request_is_none() -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    for engine in engines:
        engine.say = dying(engine, 7)
    client = RolloutClient(engines, timeout_s=5, records_routing=True)
    with pytest.raises(NoEngine, match="no rollout engine is left"):
        run(client.generate("a", [9], SAMPLING))
    assert balanced(client) == (0, 1, 0)


def test_a_cut_connection_to_a_living_engine_costs_one_more_try() -> None:
    engine = ScriptedEngine()

    async def say(hear: OnToken, sampling: Sampling) -> TokenOutput:
        engine.say = counting
        raise ConnectionError("the connection was cut")

    engine.say = say
    client = RolloutClient([engine], timeout_s=5)
    assert run(client.generate("a", [1], SAMPLING)).token_ids == tuple(range(7))
    assert [name for name, *_ in engine.asked] == ["a", "a~1"]


def test_an_engine_that_gives_no_token_is_probed_and_given_up() -> None:
    async def body() -> TokenOutput:
        stuck, good = ScriptedEngine(), ScriptedEngine(counting)

        async def never() -> Mapping[str, float]:
            await asyncio.Event().wait()
            raise AssertionError

        stuck.health = never  # type: ignore[method-assign]
        client = RolloutClient([stuck, good], timeout_s=60, silence_s=0.05, probe_s=0.1)
        got = await client.generate("a", [1], SAMPLING)
        assert stuck.ended == ["a"]
        assert (client.counts.reissued, *balanced(client)) == (1, 1, 0, 0)
        return got

    assert run(body(), seconds=5).token_ids == tuple(range(7))


def test_an_engine_too_busy_for_a_probe_is_alive() -> None:
    async def body() -> None:
        engine = ScriptedEngine()

        async def never() -> Mapping[str, float]:
            await asyncio.Event().wait()
            raise AssertionError

        async def slow(hear: OnToken, sampling: Sampling) -> TokenOutput:
            for token in range(8):
                await asyncio.sleep(0.06)
                hear(token, -float(token), 0)
            return output(*range(8))

        engine.say, engine.health = slow, never  # type: ignore[method-assign]
        client = RolloutClient([engine], timeout_s=60, silence_s=0.04, probe_s=0.1)
        assert (await client.generate("a", [1], Sampling(key=0, max_tokens=8))).token_ids == tuple(range(8))
        assert client.counts.reissued == 0

    run(body(), seconds=5)


def test_without_any_engine_left_the_cause_is_named() -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    for engine in engines:
        engine.say = dying(engine, 1)
    client = RolloutClient(engines, timeout_s=5)
    with pytest.raises(
        NoEngine,
        match="no rollout engine is left: engine 0: its process is gone.*; engine 1: its process is gone",
    ):
        run(client.generate("a", [1], SAMPLING))
    assert balanced(client) == (0, 1, 0)


def test_an_engine_serves_again_once_it_answers() -> None:
    engine = ScriptedEngine()
    engine.say = dying(engine, 1)
    client = RolloutClient([engine], timeout_s=5)

    async def body() -> None:
        with pytest.raises(NoEngine):
            await client.generate("a", [1], SAMPLING)
        engine.say, engine.numbers = counting, {}
        assert (await client.generate("b", [1], SAMPLING)).token_ids == tuple(range(7))

    run(body())


def test_a_replacement_serves_only_at_the_current_version() -> None:
    first, other = ScriptedEngine(version=3), ScriptedEngine(version=3)
    replacements = [ScriptedEngine(counting, version=2), ScriptedEngine(counting, version=3)]
    restarted: list[int] = []

    async def restart(index: int) -> RolloutEngine:
        restarted.append(index)
        return replacements[len(restarted) - 1]

    async def body() -> None:
        client = RolloutClient([first, other], timeout_s=5, restart=restart)
        first.say = dying(first, 1)
        held = asyncio.create_task(client.generate("held", [1], SAMPLING))  # at the first; then at the other
        await turns(20)
        assert [name for name, *_ in other.asked] == ["held~1"]
        assert restarted == [0]
        (replica, _) = client._router.replicas
        assert replica.cause == (
            "its process is gone; its replacement: it holds version 2, and version 3 is current"
        )
        replica.retry_at = 0.0
        async with asyncio.timeout(5):
            while replica.cause:
                await asyncio.sleep(0.02)
        assert (await client.generate("next", [1], SAMPLING)).token_ids == tuple(range(7))
        assert replacements[0].asked == []
        assert [name for name, *_ in replacements[1].asked] == ["next"]
        held.cancel()

    run(body())


@pytest.mark.parametrize("during", ["the start", "the probe"])
def test_what_was_started_in_a_call_serves_in_the_next_one(during: str) -> None:
    """The others have answered everything, the loop stands still for longer than a probe may take, and goes on."""
    first, other, another = ScriptedEngine(), ScriptedEngine(counting), ScriptedEngine(counting)
    is_ready, probed, restarted = asyncio.Event(), asyncio.Event(), []

    async def restart(index: int) -> RolloutEngine:
        restarted.append(index)
        if during == "the start":
            await is_ready.wait()
        return another

    async def health() -> Mapping[str, float]:
        if not probed.is_set():
            probed.set()
            await asyncio.sleep(0.2)
        return {}

    another.health = health  # type: ignore[method-assign]

    async def body() -> None:
        client = RolloutClient([first, other], timeout_s=5, restart=restart, probe_s=0.1)
        first.say = dying(first, 1)
        assert (await client.generate("a", [1], SAMPLING)).token_ids == tuple(
            range(7)
        )  # at the other, in the end
        is_ready.set()
        await turns(20)
        time.sleep(0.3)
        probed.set()
        other.say = None
        held = asyncio.create_task(client.generate("held", [1], SAMPLING))
        async with asyncio.timeout(5):
            while client._router.replicas[0].cause:
                await asyncio.sleep(0.02)
            assert (await client.generate("b", [1], SAMPLING)).token_ids == tuple(range(7))
        assert [name for name, *_ in another.asked] == ["b"]
        assert restarted == [0]
        held.cancel()

    run(body())


def test_a_request_that_ends_engine_after_engine_is_not_tried_for_ever() -> None:
    async def restart(index: int) -> RolloutEngine:
        engine = ScriptedEngine()
        engine.say = dying(engine, 0)
        return engine

    async def body() -> None:
        client = RolloutClient([await restart(0)], timeout_s=5, restart=restart)
        with pytest.raises(
            NoEngine, match="a was lost with 5 engines, one after another, and is not tried again"
        ):
            await client.generate("a", [1], SAMPLING)
        assert client.counts.reissued == 4

    run(body())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; a request generates at least 1 token"),
        ({"temperature": -0.1}, "temperature is -0.1; use 0 for greedy"),
        ({"top_p": 0.0}, "top_p is 0.0; use a probability"),
        ({"top_p": 1.5}, "top_p is 1.5; use a probability"),
        ({"top_k": -1}, "top_k is -1; use 0 for off"),
        ({"key": -1}, "key is -1; use a 64-bit number"),
        ({"key": 1 << 64}, "key is 18446744073709551616; use a 64-bit number"),
        ({"position": -1}, "position is -1"),
    ],
)
def test_sampling_options_are_checked(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sampling(**{"key": 0, "max_tokens": 1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"samples_per_prompt": 0},
            "rollout.samples_per_prompt is 0, but it needs a whole number of at least 1",
        ),
        (
            {"temperature": 0.0},
            "rollout.temperature is 0.0, but it needs a number above 0: greedy decoding has no",
        ),
        ({"top_p": 0.0}, "rollout.top_p is 0.0, but it needs a number above 0 and at most 1"),
        ({"top_k": -1}, "rollout.top_k is -1, but it needs a whole number of at least 0"),
        ({"max_running": 0}, "rollout.max_running is 0, but it needs a whole number"),
        ({"timeout_s": 0}, "rollout.timeout_s is 0, but it needs a number above 0"),
    ],
)
def test_configuration_is_checked(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RolloutConfig(**options)  # type: ignore[arg-type]
