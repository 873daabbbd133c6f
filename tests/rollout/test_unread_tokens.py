"""Tokens that are read while the next step runs, as on an accelerator: the same answers, with one wait less."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest
import torch
from rollout_cases import Ask, generate_all, run, token_ids, tokens, turns

from strop.engines.causal_lm import CausalLM
from strop.rollout.native import batch as batch_module
from strop.rollout.native import cache
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.request import Request
from strop.rollout.native.unread import Unread
from strop.rollout.types import Sampling, TokenOutput
from strop.utils.rng import random_key

Tiny = Callable[..., CausalLM]


def sampled(index: int, max_tokens: int, **how: object) -> Sampling:
    return Sampling(key=random_key(0, "unread", index), max_tokens=max_tokens, **how)  # type: ignore[arg-type]


def engine_of(model: CausalLM, *, reads_behind: bool, max_running: int = 4) -> NativeEngine:
    engine = NativeEngine(model, max_running=max_running)
    engine._batch._reads_behind = reads_behind
    return engine


def asks(count: int) -> list[Ask]:
    """Of many lengths, of which about a third end at a stop token."""
    ways = [{}, {"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.8}]
    return [
        (
            tokens(1 + number % 7, number % 5),
            sampled(
                number, 1 + 5 * (number % 6), stop_token_ids=tuple(range(number % 9)), **ways[number % 4]
            ),
        )
        for number in range(count)
    ]


def assert_same(found: list[TokenOutput], expected: list[TokenOutput], *, rounding: float = 1e-5) -> None:
    assert token_ids(found) == token_ids(expected)
    for output, other in zip(found, expected, strict=True):
        assert (output.stop_reason, output.versions) == (other.stop_reason, other.versions)
        assert output.log_probs == pytest.approx(other.log_probs, abs=rounding)


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gpt2", marks=pytest.mark.slow), "qwen3_5"])
@pytest.mark.parametrize("max_running", [3, 40])
def test_answers_are_those_of_tokens_that_are_read_at_once(tiny: Tiny, kind: str, max_running: int) -> None:
    model = tiny(kind, dtype="float32")
    plain, behind = (
        run(generate_all(engine_of(model, reads_behind=how, max_running=max_running), asks(30)))
        for how in (False, True)
    )
    assert {output.stop_reason for output in plain} == {"stop", "length"}
    # A sequence that ends one step later is rounded with other neighbours; with a recurrent state that adds up.
    assert_same(behind, plain, rounding=1e-4 if kind == "qwen3_5" else 1e-5)


def test_answers_are_the_same_where_memory_is_short(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3", dtype="float32")
    plain = run(generate_all(engine_of(model, reads_behind=False, max_running=12), asks(24)))
    # Tables of at most 60 tokens in all, in steps of 4: keys and values, layers, key heads, head size, bytes.
    monkeypatch.setattr(cache, "GROW_TOKENS", 4)
    monkeypatch.setattr(cache, "free_bytes", lambda _: 60 * (2 * 2 * 2 * 8 * 4) / cache.FREE_SHARE)
    engine = engine_of(model, reads_behind=True, max_running=12)
    assert_same(run(generate_all(engine, asks(24))), plain)
    assert engine._batch.num_preempted > 0


def steps_of(model: CausalLM, *, reads_behind: bool, **how: object) -> tuple[list[str], Request]:
    """Launches and reads of one request, in order."""
    seen = []
    batch = DecodeBatch(model, max_running=2)
    batch._reads_behind = reads_behind
    decode, read = batch._decode, Unread.read

    def noted_decode() -> torch.Tensor:
        seen.append("launch")
        return decode()

    def noted_read(unread: Unread) -> tuple[list[int], list[float]]:
        seen.append("read")
        return read(unread)

    request = Request("0", tuple(tokens(4, 1)), sampled(0, 6, **how))
    batch.waiting.append(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "_decode", noted_decode)
        patch.setattr(batch_module.Unread, "read", noted_read)
        while not batch.is_idle:
            batch.step(0)
    assert batch.num_decoded == len(request.token_ids)
    return seen, request


def test_a_step_is_launched_before_the_one_before_it_is_read(tiny: Tiny) -> None:
    model = tiny("qwen3", dtype="float32")
    plain, request = steps_of(model, reads_behind=False)
    # The token behind the prompt is read at once; the last one that may be asked for is waited for.
    assert plain == ["read"] + 5 * ["launch", "read"]
    behind, same = steps_of(model, reads_behind=True)
    assert behind == ["read", "launch", *(4 * ["launch", "read"]), "read"]
    assert same.token_ids == request.token_ids

    stop = request.token_ids.index(request.token_ids[3])
    stopped, ended = steps_of(model, reads_behind=True, stop_token_ids=(request.token_ids[3],))
    assert ended.token_ids == request.token_ids[: stop + 1]
    assert ended.stop_reason == "stop"
    assert stopped.count("launch") == stop + 1, "one step too many, whose token is dropped"
    assert stopped.count("read") == stop + 1


def test_keys_of_a_sequence_that_ended_are_those_of_its_tokens(tiny: Tiny) -> None:
    model = tiny("qwen3", dtype="float32")

    async def body(reads_behind: bool) -> tuple[list[float], list[TokenOutput]]:
        engine = engine_of(model, reads_behind=reads_behind)
        prompt = tokens(8, 3)
        outputs = [await engine.generate("0", prompt, sampled(0, 12, stop_token_ids=tuple(range(5))))]
        for turn in range(1, 4):
            prompt = [*prompt, *outputs[-1].token_ids, *tokens(4, turn)]
            stop = tuple(range(5))
            outputs.append(await engine.generate(f"{turn}", prompt, sampled(turn, 12, stop_token_ids=stop)))
        numbers = await engine.health()
        return [numbers[name] for name in ("cached_tokens", "prefilled_tokens", "decoded_tokens")], outputs

    numbers, plain = run(body(False))
    behind, outputs = run(body(True))
    assert "stop" in {output.stop_reason for output in plain}
    assert_same(outputs, plain)
    assert behind == numbers
    assert numbers[0] > 0


def test_an_abort_returns_what_was_sampled_and_others_go_on(tiny: Tiny) -> None:
    model = tiny("qwen3", dtype="float32")
    whole = run(
        generate_all(engine_of(model, reads_behind=False), [(tokens(5, n), sampled(n, 20)) for n in range(3)])
    )

    async def body() -> list[TokenOutput]:
        engine = engine_of(model, reads_behind=True)
        tasks = [asyncio.create_task(engine.generate(f"{n}", tokens(5, n), sampled(n, 20))) for n in range(3)]
        await turns(9)
        await engine.abort(["0"])
        return await asyncio.gather(*tasks)

    outputs = run(body())
    assert outputs[0].stop_reason == "aborted"
    assert 1 < len(outputs[0].token_ids) < 20
    assert outputs[0].token_ids == whole[0].token_ids[: len(outputs[0].token_ids)]
    assert_same(outputs[1:], whole[1:])


def test_tokens_keep_the_version_of_the_weights_that_gave_them(tiny: Tiny) -> None:
    model = tiny("qwen3", dtype="float32")
    ask = (tokens(5, 1), sampled(1, 20))
    plain = run(generate_all(engine_of(model, reads_behind=False), [ask]))[0]

    async def body() -> tuple[int, TokenOutput]:
        engine = engine_of(model, reads_behind=True)
        task = asyncio.create_task(engine.generate("0", *ask))
        await turns(9)
        num_read = len(engine._batch.running[0].token_ids)
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(-0.7)
        await engine.set_version(1)
        return num_read, await task

    before = [parameter.detach().clone() for parameter in model.module.parameters()]
    try:
        num_read, output = run(body())
        old = output.versions.count(0)
        assert old == num_read + 1, "one was not read yet"
        assert output.versions == (0,) * old + (1,) * (20 - old)
        assert 2 < old < 20
        assert output.token_ids[:old] == plain.token_ids[:old]
        rest = dataclasses.replace(ask[1], position=old, max_tokens=20 - old)
        prompt = [*ask[0], *output.token_ids[:old]]
        again = run(generate_all(engine_of(model, reads_behind=False), [(prompt, rest)]))[0]
        assert output.token_ids[old:] == again.token_ids
    finally:
        with torch.no_grad():
            for parameter, value in zip(model.module.parameters(), before, strict=True):
                parameter.copy_(value)


def test_a_model_that_gives_nan_is_an_error_and_the_engine_lives_on(tiny: Tiny) -> None:
    model = tiny("qwen3", dtype="float32")
    engine = engine_of(model, reads_behind=True)
    head = model.module.get_input_embeddings().weight  # type: ignore[operator]
    before = head.detach().clone()

    async def body() -> None:
        task = asyncio.create_task(engine.generate("0", tokens(5, 1), sampled(1, 20)))
        await turns(6)
        head.data.fill_(float("nan"))
        with pytest.raises(ValueError, match="the model gives NaN"):
            await task
        head.data.copy_(before)
        assert engine._batch.is_idle
        assert len((await engine.generate("1", tokens(5, 1), sampled(1, 3))).token_ids) == 3

    run(body())


def test_a_device_that_is_lost_is_an_error_of_the_step(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny("qwen3", dtype="float32"), reads_behind=True)

    def lost(*_: object) -> None:
        raise RuntimeError("the device is lost")

    async def body() -> None:
        task = asyncio.create_task(engine.generate("0", tokens(5, 1), sampled(1, 20)))
        await turns(6)
        monkeypatch.setattr(engine._batch, "_decode", lost)
        monkeypatch.setattr(batch_module.Unread, "read", lost)  # its tokens with it
        with pytest.raises(RuntimeError, match="the device is lost"):
            await asyncio.wait_for(task, 5)
        assert engine._batch.is_idle

    run(body())


Call = Callable[[NativeEngine], Awaitable[None]]


async def set_version(engine: NativeEngine) -> None:
    await engine.set_version(1)
    assert engine.version == 1


async def abort_one(engine: NativeEngine) -> None:
    await engine.abort(["0"])


async def sleep(engine: NativeEngine) -> None:
    await engine.pause()
    await engine.sleep()
    await engine.resume()


@pytest.mark.parametrize("call", [set_version, abort_one, sleep], ids=lambda call: call.__name__)
@pytest.mark.parametrize("fault", ["the model gives NaN", "the device is lost"])
def test_a_call_that_finds_the_last_step_failed_goes_on_and_the_requests_get_the_error(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, call: Call, fault: str
) -> None:
    engine = engine_of(tiny("qwen3", dtype="float32"), reads_behind=True, max_running=2)
    read = Unread.read

    def failed(unread: Unread) -> tuple[list[int], list[float]]:
        if fault == "the device is lost":
            raise RuntimeError(fault)
        ids, log_probs = read(unread)
        return ids, [float("nan")] * len(log_probs)

    async def body() -> None:
        # Two run and one waits.
        asked = [(f"{n}", tokens(5, n), sampled(n, 20)) for n in range(3)]
        tasks = [asyncio.create_task(engine.generate(*ask)) for ask in asked]
        await turns(9)
        assert engine._batch._unread is not None
        assert len(engine._batch.waiting) == 1
        with monkeypatch.context() as patch:
            patch.setattr(batch_module.Unread, "read", failed)
            await call(engine)
        for task in tasks:
            with pytest.raises((ValueError, RuntimeError), match=fault):
                await asyncio.wait_for(task, 5)
        assert engine._batch.is_idle
        assert engine._batch.prefill.num_bytes == 0, "nothing that it computed is used again"
        again = await asyncio.wait_for(engine.generate(*asked[0]), 20)
        assert again.token_ids == expected.token_ids

    plain = engine_of(tiny("qwen3", dtype="float32"), reads_behind=False)
    expected = run(generate_all(plain, [(tokens(5, 0), sampled(0, 20))]))[0]
    run(body())


def test_a_requester_that_leaves_after_a_failed_step_leaves_the_error_to_the_others(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny("qwen3", dtype="float32"), reads_behind=True)

    def lost(_: Unread) -> tuple[list[int], list[float]]:
        raise RuntimeError("the device is lost")

    async def body() -> None:
        tasks = [asyncio.create_task(engine.generate(f"{n}", tokens(5, n), sampled(n, 20))) for n in range(2)]
        await turns(9)
        monkeypatch.setattr(engine._batch, "step", lambda _: None)  # the cancelled one is the first to read
        monkeypatch.setattr(batch_module.Unread, "read", lost)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        with pytest.raises(RuntimeError, match="the device is lost"):
            await asyncio.wait_for(tasks[1], 5)
        assert engine._batch.is_idle

    run(body())
