"""Rules of weights and memory: new weights are really used, memory is really given back."""

from __future__ import annotations

import dataclasses

import pytest
from rollout.engine_contract.case import EngineCase, Rule, refused
from rollout.engine_contract.generation import greedy, sampled

from strop.rollout.types import TokenOutput

_SHARED = 24
"""Tokens of a prompt that several requests share: more than a block of any engine's cache."""


async def update(case: EngineCase) -> None:
    """New weights are really used, and their version stands on every token.

    Every matrix changes, tied embeddings included; the prompt was computed with the weights before. Then back.
    """
    prompt = case.prompt(_SHARED, 10)
    before = await case.ask(prompt, greedy(12))
    try:
        case.model.change(1)
        version = await case.load()
        after = await case.ask(prompt, greedy(12))
        versions = {*after.versions, case.engine.version}
        assert versions == {version}, (
            f"version {version} was set; tokens carry {sorted(set(after.versions))}, the engine says "
            f"{case.engine.version}"
        )
        case.compare(prompt, after)
        longer = case.prompt(3, 11)
        case.compare(longer, await case.ask(longer, sampled(11, max_tokens=12)))
    finally:
        case.model.restore()
        await case.load()
    again = await case.ask(prompt, greedy(12))
    case.compare(prompt, again)
    assert again.token_ids == before.token_ids, (
        "with the first weights again, greedy decoding gives other tokens"
    )


async def adapter(case: EngineCase) -> None:
    """An adapter that was merged is really used.

    W + B A is loaded; the reference model computes the adapter beside W.
    """
    prompt = case.prompt(7, 12)
    try:
        merged = case.model.add_adapter(2)
        if not merged:
            pytest.skip("no linear layers by name in this model")
        held = {name for one in case.target.weights_metadata() for name in one.names}
        assert merged.keys() <= held, f"the engine has no weights {sorted(merged.keys() - held)[:3]}"
        await case.load(merged)
        case.compare(prompt, await case.ask(prompt, greedy(12)))
    finally:
        case.model.restore()
        await case.load()


async def backwards(case: EngineCase) -> None:
    """Versions only grow.

    An older one is refused, and the one that is held stays.
    """
    version = await case.load()
    await refused(case.engine.set_version(version - 1), f"version {version - 1} after version {version}")
    assert case.engine.version == version, f"the engine is at version {case.engine.version}, not {version}"


async def update_refused(case: EngineCase) -> None:
    """Without update_in_flight, a version during requests is refused.

    The request goes on as if nothing had been asked.
    """
    if "update_in_flight" in case.engine.abilities:
        pytest.skip("it is able to")
    version = case.engine.version
    output = await case.refused_meanwhile(
        case.prompt(5, 13),
        greedy(case.long),
        lambda _: case.engine.set_version(version + 1),
        "a version while a request runs",
    )
    assert set(output.versions) == {version}, f"its tokens carry the versions {sorted(set(output.versions))}"
    case.compare(case.prompt(5, 13), output)


async def update_in_flight(case: EngineCase) -> None:
    """Requests go on with new weights.

    Held, given new weights, and let go on: tokens before the update are the old model's, tokens after it are the new
    one's over all tokens so far, with nothing left in the cache of what the old one computed; versions say which.
    """
    case.needs("update_in_flight")
    prompts = [case.prompt(length, 14 + length) for length in (5, 9, _SHARED)]
    asked = [
        case.begin(prompt, sampled(14, n, max_tokens=case.long // 2)) for n, prompt in enumerate(prompts)
    ]
    for one in asked:
        await one.tokens(3)
    old = case.engine.version
    try:
        await case.engine.pause()
        case.model.change(3)
        new = await case.load()
        await case.engine.resume()
        outputs = [await one.task for one in asked]
        for prompt, output in zip(prompts, outputs, strict=True):
            count = output.versions.count(old)
            wanted = (old,) * count + (new,) * (case.long // 2 - count)
            is_partial = 0 < count < case.long // 2
            assert is_partial and output.versions == wanted, (  # noqa: PT018  (one sentence for both)
                f"updated from {old} to {new} under way, the tokens carry {output.versions}"
            )
            case.compare([*prompt, *output.token_ids[:count]], _slice(output, count, None))
            case.model.restore()
            case.compare(prompt, _slice(output, 0, count))
            case.model.change(3)
    finally:
        case.model.restore()
        await case.load()


def _slice(output: TokenOutput, start: int, end: int | None) -> TokenOutput:
    part = slice(start, end)
    return dataclasses.replace(
        output,
        token_ids=output.token_ids[part],
        log_probs=output.log_probs[part],
        versions=output.versions[part],
    )


async def sleep(case: EngineCase) -> None:
    """Sleep gives the cache's memory back.

    By the engine's own number; refused while a request runs. Awake again it generates as before.
    """
    prompt = case.prompt(_SHARED, 15)
    before = await case.refused_meanwhile(
        prompt,
        greedy(case.long // 2),
        lambda _: case.engine.sleep(),
        "sleep while a request runs",
    )
    held = await case.number("cache_bytes")
    assert held > 0, "after a request the engine says that its cache takes no memory"
    await case.engine.sleep()
    left = await case.number("cache_bytes")
    await case.engine.wake_up()
    assert left < held, f"asleep, the cache still takes {left:g} of {held:g} bytes"
    again = await case.ask(prompt, greedy(case.long // 2))
    case.compare(prompt, again)
    assert again.token_ids == before.token_ids, "awake again, greedy decoding gives other tokens"


async def deep_sleep(case: EngineCase) -> None:
    """Sleep(2) gives the memory of the weights back.

    By the engine's own number; awake again it holds nothing until weights are written.
    """
    case.needs("frees_weights")
    prompt = case.prompt(6, 16)
    before = await case.ask(prompt, greedy(8))
    held = await case.number("weights_bytes")
    await case.engine.sleep(2)
    left = await case.number("weights_bytes")
    await case.engine.wake_up()
    await case.load()
    assert left < held / 2, f"asleep, the weights still take {left:g} of {held:g} bytes"
    again = await case.ask(prompt, greedy(8))
    assert again.token_ids == before.token_ids, "with its weights again, greedy decoding gives other tokens"


async def deep_sleep_refused(case: EngineCase) -> None:
    """Sleep(2) without frees_weights is refused.

    The weights stay, and are used.
    """
    if "frees_weights" in case.engine.abilities:
        pytest.skip("it is able to")
    await refused(case.engine.sleep(2), "sleep(2)")
    assert len((await case.ask([0, 1], greedy(2))).token_ids) == 2, "it generates no more"


async def prefix_reuse(case: EngineCase) -> None:
    """The samples of a prompt compute it once.

    By the engine's count of computed prompt tokens; after `flush_cache` it is computed anew.

    An engine that shares whole blocks of its cache says their size.
    """
    prompt = case.prompt(_SHARED + 2 * await _block_tokens(case), 17)
    for _ in range(2):
        await case.engine.flush_cache()
        before = await case.number("prefilled_tokens")
        outputs = await case.ask_all([(prompt, sampled(17, n, max_tokens=4)) for n in range(6)])
        computed = await case.number("prefilled_tokens") - before
        assert len(prompt) - 1 <= computed < 2 * len(prompt), (
            f"six samples of a prompt of {len(prompt)} tokens after a flush: {computed:g} tokens were computed"
        )
        for output in outputs:
            case.compare(prompt, output)


async def turn_reuse(case: EngineCase) -> None:
    """A later turn computes only what is new.

    The second turn begins with the first one's prompt and answer. An engine need not do this.
    """
    first = case.prompt(_SHARED + 2 * await _block_tokens(case), 18)
    answer = await case.ask(first, sampled(18, max_tokens=12))
    second = [*first, *answer.token_ids, *case.prompt(5, 19)]
    before = await case.number("prefilled_tokens")
    output = await case.ask(second, greedy(6))
    computed = await case.number("prefilled_tokens") - before
    case.compare(second, output)
    if computed >= len(second):
        pytest.skip("every turn computes its whole prompt")


async def _block_tokens(case: EngineCase) -> int:
    """Tokens in a block of the cache, of an engine that shares no less."""
    return int((await case.engine.health()).get("block_tokens", 0))


WEIGHTS: tuple[Rule, ...] = (
    update,
    adapter,
    backwards,
    update_refused,
    update_in_flight,
    sleep,
    deep_sleep,
    deep_sleep_refused,
    prefix_reuse,
    turn_reuse,
)
