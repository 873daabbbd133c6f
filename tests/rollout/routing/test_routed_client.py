"""Workers of one loop behind a real router: requests are taken over, lost ones go on, a step ends for all at once."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from rollout.scripted_engine import ScriptedEngine, output
from rollout_cases import run, tokens

from strop.engines.causal_lm import CausalLM
from strop.protocol.routed_experts import RoutedExperts
from strop.rollout.client import EngineClient, NoEngine
from strop.rollout.native.engine import NativeEngine
from strop.rollout.routing import wire
from strop.rollout.routing.client import RoutedClient
from strop.rollout.routing.router import Router
from strop.rollout.types import OnToken, RolloutEngine, Sampling, TokenOutput

PACE_S = 0.01
LONG = Sampling(key=0, max_tokens=60)


@dataclass
class Worker:
    """A client and the engine at home there."""

    engine: RolloutEngine
    client: RoutedClient


@asynccontextmanager
async def workers(
    *engines: RolloutEngine, capacity: int = 64, patience_s: float = 0.1, can_continue: bool = True,
    begins_again: bool = False, records_routing: bool = False,
) -> AsyncIterator[tuple[Router, list[Worker]]]:  # fmt: skip
    """Workers that have joined a router."""
    router = Router("127.0.0.1", patience_s=patience_s)
    members = [
        Worker(
            engine,
            RoutedClient(
                EngineClient(engine, timeout_s=20), begins_again=begins_again, records_routing=records_routing
            ),
        )
        for engine in engines
    ]
    try:
        for index, member in enumerate(members):
            await member.client.join(
                router.address, index=index, host="127.0.0.1", capacity=capacity, can_continue=can_continue
            )
        yield router, members
    finally:
        for member in members:
            await member.client.close()
        await asyncio.to_thread(router.close)


async def paced(hear: OnToken, sampling: Sampling) -> TokenOutput:
    """Tokens position, position + 1, ...: what an undisturbed engine says, one each PACE_S."""
    whole = output(*range(sampling.position, sampling.position + sampling.max_tokens))
    for token in whole.token_ids:
        await asyncio.sleep(PACE_S)
        hear(token, -float(token), 0)
    return whole


def recorded(whole: TokenOutput, num_read: int) -> TokenOutput:
    """An output with a record of experts of so many tokens, of which token i went to expert i."""
    tokens = tuple(expert.to_bytes(2, "little") for expert in range(num_read))
    return dataclasses.replace(whole, routed_experts=RoutedExperts(num_layers=1, num_chosen=1, tokens=tokens))


async def recording(hear: OnToken, sampling: Sampling) -> TokenOutput:
    """As paced, with the experts of what it read: three tokens of a prompt, and all but the last of its answer."""
    return recorded(await paced(hear, sampling), 3 + sampling.position + sampling.max_tokens - 1)


async def generated(worker: Worker, names: list[str], sampling: Sampling = LONG) -> list[TokenOutput]:
    return await asyncio.gather(*(worker.client.generate(f"{name}#0", [1, 2, 3], sampling) for name in names))


async def step(*works: tuple[Worker, Coroutine[Any, Any, Any]]) -> list[Any]:
    """A step of several workers."""
    return await asyncio.gather(
        *(worker.client.run_together(work, version=worker.engine.version) for worker, work in works)
    )


async def together(*works: Awaitable[Any], return_exceptions: bool = False) -> list[Any]:
    """The work of one worker, which begins with its part of the step."""
    return list(await asyncio.gather(*works, return_exceptions=return_exceptions))


async def nothing() -> None:
    return None


def test_without_a_router_a_client_asks_its_own_engine() -> None:
    async def body() -> None:
        client = RoutedClient(EngineClient(ScriptedEngine(paced), timeout_s=5))
        assert await client.run_together(client.generate("a", [1], LONG), version=0) == output(*range(60))

    run(body())


def test_idle_engines_take_over_half_and_the_tokens_are_those_of_an_undisturbed_one() -> None:
    async def body() -> None:
        async with workers(*(ScriptedEngine(paced) for _ in range(3))) as (router, (a, b, c)):
            heard: list[int] = []
            listened = a.client.generate(
                "9#0", [1, 2, 3], LONG, on_token=lambda token, *_: heard.append(token)
            )
            work = together(generated(a, list("01234567")), listened)
            (done, listened_to), _, _ = await step((a, work), (b, nothing()), (c, nothing()))
            assert [*done, listened_to] == [output(*range(60))] * 9
            assert heard == list(range(60))
            begun_elsewhere = [*b.engine.asked, *c.engine.asked]
            assert len(begun_elsewhere) >= 4
            assert all(ids == (1, 2, 3, *range(sampling.position)) for _, ids, sampling in begun_elsewhere)
            assert any(sampling.position for _, _, sampling in begun_elsewhere)
            assert router.take_stats().num_taken_over >= 4

    run(body())


def test_requests_of_other_workers_come_with_the_experts_of_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "EXPERT_PART_BYTES", 15)  # nine parts of seven tokens

    async def body() -> None:
        engines = [ScriptedEngine(recording) for _ in range(2)]
        async with workers(*engines, records_routing=True) as (router, (a, b)):
            done, _ = await step((a, generated(a, list("0123"))), (b, nothing()))
            assert router.take_stats().num_taken_over >= 2
            assert any(sampling.position for _, _, sampling in engines[1].asked)
            assert done == [recorded(output(*range(60)), 3 + 59)] * 4

    run(body())


def test_large_records_of_experts_wait_until_earlier_ones_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "EXPERT_PART_BYTES", 1 << 20)
    monkeypatch.setattr(wire, "MAX_UNREAD_BYTES", 3 << 20)
    experts = RoutedExperts(num_layers=20_000, num_chosen=1, tokens=(bytes(40_000),) * 65)

    async def large(hear: OnToken, sampling: Sampling) -> TokenOutput:
        hear(0, -0.0, 0)
        await asyncio.sleep(0.3)  # so that all end together
        return dataclasses.replace(output(0), routed_experts=experts)

    async def body() -> None:
        engines = [ScriptedEngine(large) for _ in range(2)]
        async with workers(*engines, capacity=12, patience_s=60, records_routing=True) as (_, (a, b)):
            work = generated(a, [str(number) for number in range(24)], Sampling(key=0, max_tokens=1))
            done, _ = await step((a, work), (b, nothing()))
            assert [one.routed_experts for one in done] == [experts] * 24
            assert [len(engine.asked) for engine in engines] == [12, 12]

    run(body())


@pytest.mark.parametrize(
    "value",
    [
        [1, 1], [1, 0, "AAA="], [2, 1, "AAAAAA=="], [1, 1, "AAAA"], [1, 1, "no base64"], "AAA=",
    ],
)  # fmt: skip
def test_what_is_no_record_of_experts_of_the_same_routers_is_garbage(value: object) -> None:
    before = wire.with_part(None, [1, 1, "AAE="])
    assert before.tokens == (b"\0\1",)
    with pytest.raises(wire.Garbage, match="record of experts"):
        wire.with_part(before, value)


def test_requests_above_the_capacity_go_to_whoever_has_room() -> None:
    async def body() -> None:
        engines = [ScriptedEngine(paced) for _ in range(2)]
        async with workers(*engines, capacity=2, patience_s=60) as (_, (a, b)):
            short = Sampling(key=0, max_tokens=5)
            done, _ = await step((a, generated(a, list("01234567"), short)), (b, nothing()))
            assert done == [output(*range(5))] * 8
            assert len(engines[0].asked) == len(engines[1].asked) == 4

    run(body())


def test_a_step_ends_for_all_when_the_last_worker_has_its_own() -> None:
    async def body() -> None:
        async with workers(ScriptedEngine(paced), ScriptedEngine(paced)) as (_, (a, b)):
            begun = time.monotonic()
            for _ in range(2):  # a worker may begin after another has ended
                early = asyncio.create_task(b.client.run_together(nothing(), version=0))
                await asyncio.sleep(0.05)
                assert not early.done()
                await a.client.run_together(generated(a, ["0"]), version=0)
                await early
            assert time.monotonic() - begun > 2 * 60 * PACE_S

    run(body())


def test_a_worker_that_fails_keeps_nobody() -> None:
    async def failing() -> None:
        raise ValueError("the scorers cannot go on")

    async def body() -> None:
        async with workers(ScriptedEngine(paced), ScriptedEngine(paced)) as (_, (a, b)):
            failed, done = await asyncio.gather(
                a.client.run_together(failing(), version=0),
                b.client.run_together(generated(b, ["0"]), version=0),
                return_exceptions=True,
            )
            assert isinstance(failed, ValueError)
            assert done == [output(*range(60))]

    run(body())


@pytest.mark.parametrize("begins_again", [False, True])
def test_requests_of_a_worker_that_is_gone_go_on_behind_the_tokens_that_were_heard(
    begins_again: bool,
) -> None:
    async def body() -> None:
        engines = [ScriptedEngine(paced) for _ in range(3)]
        async with workers(*engines, capacity=1, begins_again=begins_again) as (_, (a, b, c)):
            heard: dict[str, list[int]] = {"0": [], "1": []}

            async def listened(name: str) -> TokenOutput:
                return await a.client.generate(
                    f"{name}#0", [1], LONG, on_token=lambda token, *_: heard[name].append(token)
                )

            async def lose() -> None:
                """The first of b and c that serves; the other one goes on."""
                while not (
                    any(one.engine.asked for one in (b, c)) and all(len(one) > 9 for one in heard.values())
                ):
                    await asyncio.sleep(0.01)
                lost, left = (b, c) if b.engine.asked else (c, b)
                goes_on.append(left.engine)
                await lost.client.close()

            goes_on: list[Any] = []
            both = together(listened("0"), listened("1"))
            done, _, _ = await step((a, both), (c, nothing()), (b, lose()))
            assert done == [output(*range(60))] * 2
            assert heard == {"0": list(range(60)), "1": list(range(60))}
            (_, _, again) = goes_on[0].asked[-1]
            assert (again.position == 0) == begins_again

    run(body())


def test_engines_that_are_lost_have_their_requests_served_by_other_workers() -> None:
    async def no_engine(hear: OnToken, sampling: Sampling) -> TokenOutput:
        hear(0, 0.0, 0)
        await asyncio.sleep(PACE_S)
        raise NoEngine("it died")

    async def body() -> None:
        async with workers(ScriptedEngine(no_engine), ScriptedEngine(paced)) as (_, (a, b)):
            done, _ = await step((a, generated(a, ["0", "1"])), (b, nothing()))
            assert done == [output(*range(60))] * 2

    run(body())


@pytest.mark.parametrize("begins_again", [False, True])
def test_nothing_is_asked_again_of_another_worker_when_only_the_end_was_lost(begins_again: bool) -> None:
    async def ending(hear: OnToken, sampling: Sampling) -> TokenOutput:
        for token in range(3):
            hear(token, -float(token), 0)
        raise NoEngine("it died")

    async def body() -> None:
        engines = ScriptedEngine(ending), ScriptedEngine(paced)
        async with workers(*engines, begins_again=begins_again) as (_, (a, b)):
            work = generated(a, ["0"], Sampling(key=0, max_tokens=3))
            done, _ = await step((a, work), (b, nothing()))
            assert done == [output(0, 1, 2)]
            assert engines[1].asked == []

    run(body())


def test_another_worker_reads_a_request_that_lost_its_experts_alone() -> None:
    async def ending(hear: OnToken, sampling: Sampling) -> TokenOutput:
        for token in range(3):
            hear(token, -float(token), 0)
        raise NoEngine("it died")

    async def body() -> None:
        engines = ScriptedEngine(ending), ScriptedEngine(recording)
        async with workers(*engines, records_routing=True) as (_, (a, b)):
            work = generated(a, ["0"], Sampling(key=0, max_tokens=3))
            done, _ = await step((a, work), (b, nothing()))
            assert done == [recorded(output(0, 1, 2), 3 + 2)]
            ((_, ids, sampling),) = engines[1].asked
            assert (ids, sampling.position, sampling.max_tokens) == ((1, 2, 3, 0, 1), 2, 1)

    run(body())


def test_where_no_worker_is_left_the_error_says_why() -> None:
    async def no_engine(hear: OnToken, sampling: Sampling) -> TokenOutput:
        raise NoEngine("it died")

    async def body() -> None:
        async with workers(ScriptedEngine(no_engine), ScriptedEngine(no_engine)) as (_, (a, b)):
            with pytest.raises(
                NoEngine, match="no rollout worker serves: rollout worker 0: it died; rollout worker 1"
            ):
                await step((a, generated(a, ["0"])), (b, nothing()))

    run(body())


def test_errors_of_a_request_arrive_where_it_was_asked_for() -> None:
    async def refusing(hear: OnToken, sampling: Sampling) -> TokenOutput:
        raise ValueError("request 1 has 0 prompt tokens")

    async def body() -> None:
        async with workers(ScriptedEngine(paced), ScriptedEngine(refusing), capacity=1) as (_, (a, b)):
            both = [a.client.generate(f"{name}#0", [1], LONG) for name in "01"]
            results, _ = await step((a, together(*both, return_exceptions=True)), (b, nothing()))
            assert results[0] == output(*range(60))
            assert isinstance(results[1], ValueError)
            assert str(results[1]) == "request 1 has 0 prompt tokens"

    run(body())


def test_without_the_router_each_worker_ends_its_own() -> None:
    async def body() -> None:
        engines = [ScriptedEngine(paced) for _ in range(2)]
        async with workers(*engines, capacity=1, patience_s=60) as (router, (a, b)):
            places = [one.client._membership.server.at for one in (a, b)]  # type: ignore[union-attr]

            async def end_it() -> None:
                while not (engines[1].asked):
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(router.close)

            done, _ = await step((a, generated(a, ["0", "1", "2"])), (b, end_it()))
            assert done == [output(*range(60))] * 3
            for place in places:
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection(*place)

    run(body())


def test_a_cancelled_request_frees_its_place_and_ends_where_it_runs() -> None:
    async def body() -> None:
        engines = [ScriptedEngine(paced) for _ in range(2)]
        async with workers(*engines, capacity=1, patience_s=60) as (_, (a, b)):

            async def cancelling() -> list[TokenOutput]:
                kept = asyncio.create_task(generated(a, ["0"]))
                await asyncio.sleep(0.05)
                dropped = asyncio.create_task(generated(a, ["1"]))
                while not engines[1].asked:
                    await asyncio.sleep(0.01)
                waiting = asyncio.create_task(generated(a, ["2"]))
                await asyncio.sleep(0.05)
                dropped.cancel()
                return [*await kept, *await waiting]

            done, _ = await step((a, cancelling()), (b, nothing()))
            assert done == [output(*range(60))] * 2
            assert engines[1].ended[0] == "1#0"
            assert engines[1].asked[1][0] == "2#0"

    run(body())


def test_native_engines_give_the_tokens_of_one_engine(tiny: Callable[..., CausalLM]) -> None:
    """Twelve requests of very different lengths at one of three workers."""
    asks = [
        (f"{n}#0", tokens(4 + n % 3, n), Sampling(key=n, max_tokens=56 if n % 4 == 0 else 3))
        for n in range(12)
    ]

    def native() -> NativeEngine:
        return NativeEngine(tiny("qwen3", dtype="float32"), max_running=4)

    async def alone() -> list[TokenOutput]:
        engine = native()
        return await asyncio.gather(*(engine.generate(*ask) for ask in asks))

    async def shared() -> tuple[list[TokenOutput], int]:
        async with workers(native(), native(), native(), capacity=4, patience_s=0.05) as (router, (a, b, c)):
            all_of_them = together(*(a.client.generate(*ask) for ask in asks))
            done, _, _ = await step((a, all_of_them), (b, nothing()), (c, nothing()))
            return done, router.take_stats().num_taken_over

    expected = run(alone())
    done, num_taken_over = run(shared(), seconds=100)
    assert num_taken_over > 4
    assert [one.token_ids for one in done] == [one.token_ids for one in expected]
    assert [one.stop_reason for one in done] == [one.stop_reason for one in expected]
    for ours, theirs in zip(done, expected, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
