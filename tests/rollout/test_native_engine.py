"""The engine's life: who waits, who leaves, what pauses, what fails, what memory comes back."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import answers, generate_all, run, token_ids, tokens, turns

from references.token_passes import log_probs_of
from strop.engines.causal_lm import CausalLM
from strop.engines.packing import make_rows
from strop.rollout.native import cache, prefill
from strop.rollout.native import engine as engine_module
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.prefix_cache import Prefix, PrefixStore
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling, TokenOutput
from strop.utils.rng import random_key

Tiny = Callable[..., CausalLM]


@pytest.fixture
def model(tiny: Tiny) -> CausalLM:
    return tiny("qwen3", dtype="float32")


def sampled(index: int, max_tokens: int) -> Sampling:
    return Sampling(key=random_key(0, "test", index), max_tokens=max_tokens)


PROMPTS = [tokens(5, 1), tokens(3, 2), tokens(8, 3), tokens(2, 4)]


def started(engine: NativeEngine, max_tokens: list[int]) -> list[asyncio.Task[TokenOutput]]:
    """Tasks "0", "1", ... of different prompts."""
    return [
        asyncio.create_task(engine.generate(f"{i}", PROMPTS[i % 4], sampled(i, limit)))
        for i, limit in enumerate(max_tokens)
    ]


def test_finished_leave_and_waiting_enter_step_by_step(model: CausalLM) -> None:
    # Two slots; limits 2, 5, 2, 2. An admitted request gets its first token from the prompt and its second one
    # from the decode step of the same call.
    batch = DecodeBatch(model, max_running=2)
    limits = {"a": 2, "b": 5, "c": 2, "d": 2}
    requests = [Request(name, tuple(PROMPTS[0]), sampled(0, limit)) for name, limit in limits.items()]
    batch.waiting.extend(requests)
    seen = []
    while not batch.is_idle:
        before = [request for request in requests if request.stop_reason is None]
        batch.step(7)
        ended = [(r.request_id, r.stop_reason) for r in before if r.stop_reason is not None]
        seen.append((ended, [r.request_id for r in batch.running], len(batch.waiting)))
    assert seen == [
        ([("a", "length")], ["b"], 2),
        ([("c", "length")], ["b"], 1),
        ([("d", "length")], ["b"], 0),
        ([("b", "length")], [], 0),
    ]
    assert requests[1].versions == [7] * 5
    # One key, one prompt.
    assert (
        requests[3].token_ids == requests[2].token_ids == requests[1].token_ids[:2] == requests[0].token_ids
    )


def test_a_long_prompt_does_not_hold_up_those_that_decode(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 8)
    batch = DecodeBatch(model, max_running=2)
    short = Request("short", tuple(PROMPTS[0]), sampled(0, 20))
    batch.waiting.append(short)
    batch.step(0)  # 5 tokens of the prompt; two of the response
    long = Request("long", tuple(tokens(20, 9)), sampled(1, 5))
    batch.waiting.append(long)
    seen = []
    for _ in range(3):
        batch.step(0)
        seen.append((len(short.token_ids), len(long.token_ids)))
    assert seen == [
        (3, 0),
        (4, 0),
        (5, 2),
    ]  # 8, 8 and 4 tokens of the prompt; its first token with the last of them
    assert tuple(long.token_ids) == answers(model, [(list(long.prompt_ids), sampled(1, 2))])[0].token_ids


def test_an_aborted_request_returns_what_it_has_and_can_go_on(model: CausalLM) -> None:
    wanted = [answers(model, [(PROMPTS[i], sampled(i, 30))])[0] for i in range(4)]

    async def body() -> None:
        engine = NativeEngine(model, max_running=3)
        tasks = started(engine, [30] * 4)
        await turns(6)
        await engine.abort(["0", "unknown", "3"])  # 0 runs in the first of three slots; 3 still waits
        first, last = await tasks[0], await tasks[3]
        assert 0 < len(first.token_ids) < 30
        assert (first.stop_reason, last.stop_reason) == ("aborted", "aborted")
        assert first.token_ids == wanted[0].token_ids[: len(first.token_ids)]
        assert (last.token_ids, last.log_probs, last.versions) == ((), (), ())
        for i, part in ((0, first), (3, last)):
            used = len(part.token_ids)
            sampling = dataclasses.replace(sampled(i, 30 - used), position=used)
            rest = await engine.generate(f"{i} again", [*PROMPTS[i], *part.token_ids], sampling)
            assert part.token_ids + rest.token_ids == wanted[i].token_ids
        for i in (1, 2):  # the one that moved into the hole, and the other
            assert (await tasks[i]).token_ids == wanted[i].token_ids

    run(body())


def test_abort_without_ids_ends_all(model: CausalLM) -> None:
    async def body() -> list[str]:
        engine = NativeEngine(model, max_running=2)
        tasks = started(engine, [40] * 4)
        await turns(4)
        await engine.abort()
        outputs = await asyncio.gather(*tasks)
        assert (await engine.health())["running"] == 0
        return [output.stop_reason for output in outputs]

    assert run(body()) == ["aborted"] * 4


def test_abort_of_a_finished_request_keeps_its_result(model: CausalLM) -> None:
    async def body() -> None:
        engine = NativeEngine(model, max_running=2)
        (task,) = started(engine, [1])
        while not engine._requests or next(iter(engine._requests.values())).stop_reason is None:
            await turns(1)
        await engine.abort()
        assert (await task).stop_reason == "length"

    run(body())


@pytest.mark.parametrize("which", [0, 1, 2])  # the first slot, the last slot, one that waits
def test_a_cancelled_request_frees_its_slot(model: CausalLM, which: int) -> None:
    wanted = [answers(model, [(PROMPTS[i], sampled(i, 20))])[0].token_ids for i in range(4)]

    async def body() -> None:
        engine = NativeEngine(model, max_running=2)
        tasks = started(engine, [20] * 4)
        await turns(5)
        tasks[which].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[which]
        for i in range(4):
            if i != which:
                assert (await tasks[i]).token_ids == wanted[i]
        assert len((await engine.generate(f"{which}", PROMPTS[0], sampled(0, 3))).token_ids) == 3
        numbers = await engine.health()
        assert (numbers["running"], numbers["waiting"]) == (0, 0)
        assert numbers["decoded_tokens"] < 3 * 20 + 20 + 3 + 1  # the cancelled one stopped early

    run(body())


def test_all_cancelled_leaves_an_idle_engine_for_the_next_loop(model: CausalLM) -> None:
    engine = NativeEngine(model, max_running=2)

    async def cancelled() -> None:
        async with asyncio.timeout(0):  # what a failing neighbour in a task group does
            await asyncio.gather(*started(engine, [50] * 4))

    with pytest.raises(TimeoutError):
        run(cancelled())
    asks = [(PROMPTS[i], sampled(i, 5)) for i in range(4)]
    assert token_ids(run(generate_all(engine, asks))) == token_ids(answers(model, asks))


def scale(model: CausalLM, factor: float) -> None:
    """Other weights."""
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.mul_(factor)


def log_probs_after(model: CausalLM, prompt: list[int], response: tuple[int, ...]) -> torch.Tensor:
    """Log-probs [R] of the response in one forward pass under the weights as they are."""
    rows = make_rows([torch.tensor(prompt)], [torch.tensor(response)])
    return log_probs_of(model, rows, temperature=1.0, max_tokens=100)[0]


@pytest.mark.parametrize("paused", [False, True])
def test_an_update_in_flight_goes_on_with_the_tokens_and_the_new_weights(
    model: CausalLM, paused: bool
) -> None:
    plain = [answers(model, [(PROMPTS[i], sampled(i, 20))])[0] for i in range(3)]

    async def body() -> list[TokenOutput]:
        engine = NativeEngine(model, max_running=2)
        assert "update_in_flight" in engine.abilities
        tasks = started(engine, [20] * 3)
        await turns(5)
        if paused:
            await engine.pause()
            await turns(2)
        scale(model, -0.7)
        await engine.set_version(1)
        await engine.resume()
        outputs = await asyncio.gather(*tasks)
        with pytest.raises(ValueError, match="version 0 was set after version 1; versions only grow"):
            await engine.set_version(0)
        assert engine.version == 1
        return outputs

    outputs = run(body())
    for i, output in enumerate(outputs):
        old = output.versions.count(0)
        assert output.versions == (0,) * old + (1,) * (20 - old)
        assert (0 < old < 20) if i < 2 else old == 0  # the third one waited
        assert output.token_ids[:old] == plain[i].token_ids[:old]
        assert output.log_probs[:old] == pytest.approx(plain[i].log_probs[:old], abs=1e-5)
        now = log_probs_after(model, PROMPTS[i], output.token_ids)
        assert output.log_probs[old:] == pytest.approx(now[old:].tolist(), abs=1e-5)
        # The random stream goes on where it was: as a new request with the tokens so far.
        rest = dataclasses.replace(sampled(i, 20 - old), position=old)
        wanted = answers(model, [([*PROMPTS[i], *output.token_ids[:old]], rest)])[0]
        assert output.token_ids[old:] == wanted.token_ids


def test_a_deterministic_engine_gives_the_same_to_the_bit_whatever_runs_beside(model: CausalLM) -> None:
    """Prompts of many lengths and equal ones, begun in any order, and what goes on from another's answer."""
    asks = [(tokens(3 + 7 * (index % 5), seed=index // 2), sampled(index, 9 + index)) for index in range(14)]
    alone = [run(generate_all(deterministic(model), [ask]))[0] for ask in asks]
    together = run(generate_all(deterministic(model), asks))
    backwards = run(generate_all(deterministic(model), asks, list(reversed(range(14)))))
    assert alone == together == backwards

    async def one_by_one(engine: NativeEngine) -> list[TokenOutput]:
        first = await engine.generate("first", asks[0][0], asks[0][1])
        second = await engine.generate("second", [*asks[0][0], *first.token_ids, 5], asks[1][1])
        third = await engine.generate(
            "third", [*asks[0][0], *first.token_ids, 5, *second.token_ids, 7], asks[2][1]
        )
        return [first, second, third]

    first, second, third = run(one_by_one(deterministic(model)))
    goes_on = [*asks[0][0], *first.token_ids, 5, *second.token_ids, 7]
    assert run(generate_all(deterministic(model), [(goes_on, asks[2][1])])) == [third]


def deterministic(model: CausalLM) -> NativeEngine:
    return NativeEngine(model, max_running=8, deterministic=True)


def test_a_turn_goes_on_from_the_keys_and_values_of_the_one_before(model: CausalLM) -> None:
    turn = answers(model, [(PROMPTS[2], sampled(0, 9))])[0]
    prompt = [*PROMPTS[2], *turn.token_ids, *tokens(4, 11)]
    wanted = answers(model, [(prompt, sampled(1, 6))])[0]

    async def body() -> None:
        engine = NativeEngine(model, max_running=4)
        await engine.generate("0", PROMPTS[2], sampled(0, 9))
        # No copy of a first turn is kept before a second one has come: it finds the prompt alone.
        await engine.generate("0, goes on", prompt, sampled(1, 1))
        assert (await engine.health())["cached_tokens"] == 8
        await engine.flush_cache()
        before = await engine.health()
        await engine.generate("1", PROMPTS[2], sampled(0, 9))
        second = await engine.generate("2", prompt, sampled(1, 6))
        after = await engine.health()
        numbers = {name: after[name] - before[name] for name in after}
        assert numbers["cached_tokens"] == 8 + 8  # the last token of a turn was never an input
        assert numbers["prefilled_tokens"] == 8 + 1 + 4 + 1  # and the health check's own
        again = await engine.generate("3", prompt, sampled(1, 6))  # all but the token whose logits are wanted
        after = await engine.health()
        numbers = {name: after[name] - before[name] for name in after}
        assert numbers["cached_tokens"] == 16 + len(prompt) - 1
        assert numbers["prefilled_tokens"] == 14 + 1 + 1
        assert again.token_ids == second.token_ids == wanted.token_ids
        assert second.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)

    run(body())


def test_answers_that_nothing_goes_on_from_are_not_copied(model: CausalLM) -> None:
    engine = NativeEngine(model, max_running=4)
    asks = [(PROMPTS[i % 4], sampled(i, 9)) for i in range(12)]
    for _ in range(2):
        run(generate_all(engine, asks))
        per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, key heads, head size, bytes
        assert engine._batch.prefill.num_bytes == per_token * sum(map(len, PROMPTS))


@pytest.mark.parametrize("how", ["set_version", "flush_cache", "sleep"])
def test_nothing_computed_is_used_again_after(model: CausalLM, how: str) -> None:
    async def body() -> None:
        engine = NativeEngine(model, max_running=4)
        await engine.generate("1", PROMPTS[2], sampled(0, 9))
        await {
            "set_version": lambda: engine.set_version(1),
            "flush_cache": engine.flush_cache,
            "sleep": engine.sleep,
        }[how]()
        await engine.generate("2", PROMPTS[2], sampled(0, 9))
        assert (await engine.health())["cached_tokens"] == 0

    run(body())


def test_what_is_kept_for_later_takes_no_more_memory_than_what_runs(model: CausalLM) -> None:
    engine = NativeEngine(model, max_running=3)
    asks = [(tokens(10 + i, i), sampled(i, 1 + i)) for i in range(20)]
    wanted = [answers(model, [ask])[0].token_ids for ask in asks]
    for _ in range(2):
        assert token_ids(run(generate_all(engine, asks))) == wanted
        running, kept = engine._batch._cache.num_bytes, engine._batch.prefill.num_bytes
        assert 0 < kept <= running
        assert engine._batch.cache_bytes == running + kept


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_longest_beginning_of_a_prefix_that_is_kept_is_found(data: st.DataObject) -> None:
    store, kept = PrefixStore(), []
    for number in range(data.draw(st.integers(1, 8))):
        ids = tuple(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)))
        kept.append(Prefix(ids, torch.full((len(ids),), float(number))))
        store.add(kept[-1], max_bytes=4 * 12)
        while sum(len(one.token_ids) for one in kept) > 12:
            kept.pop(0)
    assert store.num_bytes == 4 * sum(len(one.token_ids) for one in kept)
    asked = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    shared = [
        next(
            (n for n, (one, other) in enumerate(zip(held.token_ids, asked, strict=False)) if one != other),
            min(len(held.token_ids), len(asked)),
        )
        for held in kept
    ]
    found = store.find(asked)
    assert (0 if found is None else found[1]) == max(shared)
    if found is not None:
        assert found[0].token_ids[: found[1]] == tuple(asked[: found[1]])


def test_publish_forgets_prompts_computed_with_older_weights(model: CausalLM) -> None:
    # Three of one prompt, one slot: the prompt stays for those that wait. Published with only waiting ones
    # left, it must be computed again.
    prompt, sampling = PROMPTS[0], Sampling(key=0, temperature=0.0, max_tokens=3)

    async def body() -> TokenOutput:
        engine = NativeEngine(model, max_running=1)
        tasks = [asyncio.create_task(engine.generate(f"{i}", prompt, sampling)) for i in range(3)]
        await turns(3)
        await engine.pause()
        await engine.abort(["0"])
        scale(model, -0.7)
        await engine.set_version(1)
        await engine.resume()
        outputs = await asyncio.gather(*tasks)
        assert outputs[1] == outputs[2]
        assert outputs[2].versions == (1, 1, 1)
        return outputs[2]

    output = run(body())
    wanted = answers(model, [(prompt, sampling)])[0]
    assert output.token_ids == wanted.token_ids
    assert output.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)


def test_pause_holds_and_resume_goes_on(model: CausalLM) -> None:
    wanted = [answers(model, [(PROMPTS[i], sampled(i, 12))])[0].token_ids for i in range(3)]

    async def body() -> None:
        engine = NativeEngine(model, max_running=2)
        tasks = started(engine, [12] * 3)
        await turns(4)
        await engine.pause()
        await turns(2)
        before = await engine.health()  # no token while paused: it answers all the same
        await turns(20)
        assert await engine.health() == before
        assert (before["paused"], before["running"], before["waiting"]) == (1, 2, 1)
        assert not any(task.done() for task in tasks)
        await engine.resume()
        assert [(await task).token_ids for task in tasks] == wanted

    run(body())


def test_requests_sent_during_a_pause_wait_for_its_end(model: CausalLM) -> None:
    async def body() -> None:
        engine = NativeEngine(model, max_running=2)
        await engine.pause()
        (task,) = started(engine, [3])
        await turns(10)
        assert not task.done()
        await engine.resume()
        assert len((await task).token_ids) == 3

    run(body())


def test_an_error_in_a_step_reaches_every_waiter_and_the_engine_lives_on(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answers(model, [(PROMPTS[0], sampled(0, 6))])[0]
    decode = DecodeBatch._decode
    calls = 0

    def failing(batch: DecodeBatch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory, for example")
        return decode(batch)

    monkeypatch.setattr(DecodeBatch, "_decode", failing)

    async def body() -> None:
        engine = NativeEngine(model, max_running=2)
        results = await asyncio.gather(*started(engine, [6] * 4), return_exceptions=True)
        assert [str(result) for result in results] == ["out of memory, for example"] * 4
        assert all(isinstance(result, RuntimeError) for result in results)
        assert (await engine.generate("again", PROMPTS[0], sampled(0, 6))).token_ids == wanted.token_ids
        assert (await engine.health())["running"] == 0

    run(body())


def test_memory_follows_the_sequences_and_sleep_gives_it_back(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "GROW_TOKENS", 4)
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, key heads, head size, bytes
    engine = NativeEngine(model, max_running=256)
    asks = [(tokens(30, i), sampled(i, 20)) for i in range(3)]
    first = run(generate_all(engine, asks))
    used = run(engine.health())["cache_bytes"]
    # 3 slots of 256 with a prompt of 30 tokens each; the last of 20 tokens is no input; in steps of 4.
    assert used - engine._batch.prefill.num_bytes == per_token * 3 * 52
    run(engine.sleep())
    assert engine._batch.cache_bytes == 0
    assert token_ids(run(generate_all(engine, asks))) == token_ids(first)
    # A longer response grows the time axis while it runs, another sequence the slots; nothing is lost.
    long = [(tokens(4, 9), sampled(9, 58)), *asks, (tokens(2, 8), sampled(8, 2))]
    assert token_ids(run(generate_all(engine, long))) == [answers(model, [ask])[0].token_ids for ask in long]


def steps(batch: DecodeBatch, count: int) -> None:
    for _ in range(count):
        batch.step(0)


def bounded(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """Tables of at most so many tokens in all, in steps of 4."""
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, key heads, head size, bytes
    monkeypatch.setattr(cache, "GROW_TOKENS", 4)
    monkeypatch.setattr(cache, "free_bytes", lambda device: num_tokens * per_token / cache.FREE_SHARE)


def test_short_memory_changes_no_token(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [(tokens(2 + i % 7, i % 5), sampled(i, 1 + 3 * (i % 8))) for i in range(24)]
    wanted = answers(model, asks)
    longest = max(len(prompt) + sampling.max_tokens for prompt, sampling in asks)
    for num_tokens in (longest + 3, 60, 150):
        bounded(monkeypatch, num_tokens)
        engine = NativeEngine(model, max_running=12, version=4)
        outputs = run(generate_all(engine, asks))
        assert token_ids(outputs) == token_ids(wanted)
        for output, free in zip(outputs, wanted, strict=True):
            assert output.log_probs == pytest.approx(free.log_probs, abs=1e-5)
            assert output.versions == (4,) * len(free.token_ids)
        numbers = run(engine.health())
        assert numbers["preempted"] > 0
        assert numbers["decoded_tokens"] == sum(len(output.token_ids) for output in wanted) + 1, "none twice"
        assert engine._batch._cache.num_bytes <= num_tokens * 2 * 2 * 2 * 8 * 4


def test_versions_of_a_preempted_sequence_stay(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # Room for two sequences of 12 tokens, or one of 24. The prompts have 5 and 3 tokens; the one that has fewer
    # tokens waits from the 13th token of the other on.
    bounded(monkeypatch, 24)
    batch = DecodeBatch(model, max_running=4)
    requests = [Request(f"{i}", tuple(PROMPTS[i]), sampled(i, 14)) for i in range(2)]
    batch.waiting.extend(requests)
    version = 0
    while not batch.is_idle:
        batch.step(version)
        version += 1
        if version == 8:
            assert [[r.request_id for r in batch.running], [r.request_id for r in batch.waiting]] == [
                ["0"],
                ["1"],
            ]
    assert batch.num_preempted == 1
    # A step samples one token; the first one two.
    assert requests[0].versions == [0, *range(13)]
    stayed = requests[1].versions.index(13)  # it enters when the other one has ended
    assert requests[1].versions[:stayed] == [0, *range(stayed - 1)]
    assert [r.token_ids for r in requests] == [
        list(answers(model, [(PROMPTS[i], sampled(i, 14))])[0].token_ids) for i in range(2)
    ]


def test_a_sequence_without_room_ends_with_a_sentence_and_the_next_one_runs(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded(monkeypatch, 16)

    async def body() -> None:
        engine = NativeEngine(model, max_running=4)
        with pytest.raises(MemoryError, match="one sequence of 17 tokens: lower data.max_response_tokens"):
            await engine.generate("long", PROMPTS[2], sampled(0, 30))
        assert len((await engine.generate("short", PROMPTS[2], sampled(0, 8))).token_ids) == 8

    run(body())


def test_a_sequence_that_cannot_grow_beside_its_old_table_grows_without_it(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answers(model, [(PROMPTS[2], sampled(0, 38))])[0]
    bounded(monkeypatch, 0)
    engine = NativeEngine(model, max_running=4)
    whole = 96 * 2 * 2 * 2 * 8 * 4  # of memory, in bytes: room for 48 tokens while nothing is held
    monkeypatch.setattr(cache, "free_bytes", lambda device: whole - engine._batch.cache_bytes)
    output = run(generate_all(engine, [(PROMPTS[2], sampled(0, 38))]))[0]
    assert output.token_ids == wanted.token_ids
    assert output.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)


@pytest.mark.parametrize("piece", [100, 4])
def test_a_prompt_that_leaves_no_room_for_its_table_ends_with_a_sentence(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Memory for the table of one sequence of 17 tokens, in steps of 4, and for half of what is computed before."""
    computed: weakref.WeakSet[cache.ComputedTensor] = weakref.WeakSet()
    make, per_token = cache.ComputedTensor.__init__, 2 * 2 * 2 * 8 * 4

    def noted(self: cache.ComputedTensor, tensor: torch.Tensor) -> None:
        make(self, tensor)
        computed.add(self)

    bounded(monkeypatch, 0)
    monkeypatch.setattr(cache.ComputedTensor, "__init__", noted)
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", piece)
    batch = DecodeBatch(model, max_running=4)
    whole = (20 / cache.FREE_SHARE + 8) * per_token
    monkeypatch.setattr(
        cache, "free_bytes",
        lambda device: whole - batch._cache.held_bytes - sum(one.nbytes for one in computed),
    )  # fmt: skip
    batch.waiting.append(Request("0", tuple(tokens(16, 1)), sampled(0, 4)))
    with pytest.raises(MemoryError, match="one sequence of 16 tokens: lower"):
        steps(batch, 12)


def test_all_that_fits_enters_whatever_a_step_computes(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 8 of 20 prompts fit, and a step computes 2.
    bounded(monkeypatch, 8 * 12)
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 10)
    batch = DecodeBatch(model, max_running=32)
    batch.waiting.extend(Request(f"{i}", tuple(tokens(5, i)), sampled(i, 6)) for i in range(20))
    running = []
    for _ in range(5):
        batch.step(0)
        running.append(len(batch.running))
    assert running[:3] == [2, 4, 6]
    assert max(running) == 8


def test_sleep_is_refused_while_sequences_run(model: CausalLM) -> None:
    async def body() -> None:
        engine = NativeEngine(model, max_running=2)
        tasks = started(engine, [20] * 2)
        await turns(4)
        with pytest.raises(
            ValueError, match="2 sequences are running; wait for them, pause or abort them first"
        ):
            await engine.sleep()
        await asyncio.gather(*tasks)
        await engine.sleep()

    run(body())


def test_sequences_that_are_paused_give_their_memory_back_and_go_on(model: CausalLM) -> None:
    async def body() -> None:
        whole = await asyncio.gather(*started(NativeEngine(model, max_running=2), [20] * 2))
        engine = NativeEngine(model, max_running=2)
        tasks = started(engine, [20] * 2)
        await turns(6)
        await engine.pause()
        assert (await engine.health())["cache_bytes"] > 0
        await engine.sleep()
        assert (await engine.health())["cache_bytes"] == 0
        await engine.resume()
        assert [one.token_ids for one in await asyncio.gather(*tasks)] == [one.token_ids for one in whole]

    run(body())


def test_health_generates_a_token(model: CausalLM) -> None:
    engine = NativeEngine(model, max_running=2, version=5)

    async def body() -> None:
        numbers, again = await asyncio.gather(
            engine.health(), engine.health()
        )  # two at once have ids of their own
        assert numbers["version"] == 5
        assert again["decoded_tokens"] == 2

    run(body())


def test_health_of_a_stuck_engine_ends(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "HEALTH_TIMEOUT_S", 0.05)

    async def body() -> None:
        engine = NativeEngine(model, max_running=1)
        tasks = started(engine, [50] * 2)
        await turns(3)
        check = asyncio.create_task(engine.health())
        await turns(1)
        await engine.pause()
        with pytest.raises(
            TimeoutError, match=r"made no token within 0.05 s \(1 sequences running, [12] waiting\)"
        ):
            await check
        await engine.abort()
        await asyncio.gather(*tasks)

    run(body())


def test_an_engine_that_computes_a_long_prompt_is_healthy(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client gave it up otherwise, and began the prompt again, until it gave up the request too."""
    monkeypatch.setattr(engine_module, "HEALTH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 1)

    async def body() -> None:
        engine = NativeEngine(model, max_running=1)
        step = engine._batch.step

        def slow(version: int) -> None:
            time.sleep(0.005)  # 40 steps of one token of the prompt each: four times as long as the limit
            step(version)

        monkeypatch.setattr(engine._batch, "step", slow)
        task = asyncio.create_task(engine.generate("long", tokens(40, 1), sampled(0, 2)))
        await turns(3)
        numbers = await engine.health()
        assert 0 < numbers["prefilled_tokens"] < 40
        assert numbers["decoded_tokens"] == 0
        assert (await task).stop_reason == "length"

    run(body())


def test_prompts_that_cannot_be_run_are_refused(model: CausalLM) -> None:
    engine = NativeEngine(model, max_running=2)
    for prompt, sentence in (
        ([], "request x has 0 prompt tokens between 0 and 0"),
        ([3, 61], "request x has 2 prompt tokens between 3 and 61, but the model's vocabulary has 61"),
        ([-1, 3], "between -1 and 3"),
    ):
        with pytest.raises(ValueError, match=sentence):
            run(engine.generate("x", prompt, sampled(0, 2)))


def test_more_tokens_than_positions_are_refused(tiny: Tiny) -> None:
    model = tiny("gpt2", dtype="float32")  # a table of 64 positions; the last token needs none
    engine = NativeEngine(model, max_running=2)
    assert len(run(engine.generate("x", tokens(60, 0), sampled(0, 5))).token_ids) == 5
    with pytest.raises(
        ValueError, match="has 60 prompt tokens and may generate 6, but the model is made for 64 positions"
    ):
        run(engine.generate("x", tokens(60, 0), sampled(0, 6)))


def test_an_id_that_runs_already_is_refused(model: CausalLM) -> None:
    async def body() -> None:
        engine = NativeEngine(model, max_running=2)
        tasks = started(engine, [5])
        await turns(1)
        with pytest.raises(ValueError, match="request 0 is already running; give each request its own id"):
            await engine.generate("0", PROMPTS[0], sampled(0, 5))
        assert len((await tasks[0]).token_ids) == 5

    run(body())


def test_other_tasks_go_on_between_steps(model: CausalLM) -> None:
    async def body() -> int:
        engine = NativeEngine(model, max_running=2)
        (task,) = started(engine, [30])
        count = 0
        while not task.done():
            await asyncio.sleep(0)
            count += 1
        return count

    assert run(body()) >= 29


def test_a_bfloat16_cache_takes_half_the_memory(tiny: Tiny) -> None:
    held = []
    for dtype in ("float32", "bfloat16"):
        engine = NativeEngine(tiny("qwen3", dtype=dtype), max_running=2)
        run(generate_all(engine, [(tokens(30, 0), sampled(0, 4))]))
        held.append(run(engine.health())["cache_bytes"])
    assert held[0] == 2 * held[1] > 0


def test_tokens_are_heard_of_as_they_are_sampled(tiny: Callable[..., CausalLM]) -> None:
    heard: list[tuple[int, float, int]] = []

    async def work() -> TokenOutput:
        engine = NativeEngine(tiny("qwen3"), max_running=2, version=3)
        try:
            return await engine.generate(
                "a", [3, 4], Sampling(key=1, max_tokens=5), on_token=lambda *token: heard.append(token)
            )
        finally:
            await engine.close()

    output = asyncio.run(work())
    assert heard == list(zip(output.token_ids, output.log_probs, output.versions, strict=True))
    assert len(heard) == 5


def test_weights_of_the_model_are_not_the_engines_to_give_back(tiny: Callable[..., CausalLM]) -> None:
    with pytest.raises(ValueError, match="off-load the model"):
        asyncio.run(NativeEngine(tiny("qwen3"), max_running=1).sleep(2))


def test_a_model_that_gives_nan_is_an_error_and_no_answer(tiny: Callable[..., CausalLM]) -> None:
    model = tiny("llama")
    engine = NativeEngine(model, max_running=2)
    weight = model.module.get_output_embeddings().weight
    kept = weight.data.clone()
    try:
        weight.data.fill_(math.nan)
        with pytest.raises(ValueError, match=r"gives NaN in place of logits .policy version 0"):
            run(engine.generate("a", tokens(4, 1), Sampling(key=1, max_tokens=3)))
    finally:
        weight.data.copy_(kept)
