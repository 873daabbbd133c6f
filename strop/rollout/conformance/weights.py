"""Checks of weights and memory: new weights are really used, memory is really given back."""

from __future__ import annotations

import dataclasses

from strop.rollout.conformance.generation import greedy, sampled
from strop.rollout.conformance.trial import Absent, Trial, check, refused, require
from strop.rollout.types import TokenOutput

_SHARED = 24
"""Tokens of a prompt that several requests share: more than a block of any engine's cache."""


@check("new weights are really used, and their version stands on every token")
async def update(trial: Trial) -> None:
    """Every matrix changes, tied embeddings included; the prompt was computed with the weights before. Then back."""
    prompt = trial.prompt(_SHARED, 10)
    before = await trial.ask(prompt, greedy(12))
    try:
        trial.judge.change(1)
        version = await trial.load()
        after = await trial.ask(prompt, greedy(12))
        require(
            set(after.versions) == {version} and trial.engine.version == version,
            f"version {version} was set; tokens carry {sorted(set(after.versions))}, the engine says "
            f"{trial.engine.version}",
        )
        trial.compare(prompt, after)
        longer = trial.prompt(3, 11)
        trial.compare(longer, await trial.ask(longer, sampled(11, max_tokens=12)))
    finally:
        trial.judge.restore()
        await trial.load()
    again = await trial.ask(prompt, greedy(12))
    trial.compare(prompt, again)
    require(
        again.token_ids == before.token_ids,
        "with the first weights again, greedy decoding gives other tokens",
    )


@check("an adapter that was merged is really used")
async def adapter(trial: Trial) -> None:
    """W + B A is loaded; the judge computes the adapter beside W."""
    prompt = trial.prompt(7, 12)
    try:
        merged = trial.judge.add_adapter(2)
        if not merged:
            raise Absent("no linear layers by name in this model")
        held = {name for one in trial.target.weights_metadata() for name in one.names}
        require(merged.keys() <= held, f"the engine has no weights {sorted(merged.keys() - held)[:3]}")
        await trial.load(merged)
        trial.compare(prompt, await trial.ask(prompt, greedy(12)))
    finally:
        trial.judge.restore()
        await trial.load()


@check("versions only grow")
async def backwards(trial: Trial) -> None:
    """An older one is refused, and the one that is held stays."""
    version = await trial.load()
    await refused(trial.engine.set_version(version - 1), f"version {version - 1} after version {version}")
    require(
        trial.engine.version == version, f"the engine is at version {trial.engine.version}, not {version}"
    )


@check("without update_in_flight, a version during requests is refused")
async def update_refused(trial: Trial) -> None:
    """The request goes on as if nothing had been asked."""
    if "update_in_flight" in trial.engine.abilities:
        raise Absent("it is able to")
    version = trial.engine.version
    output = await trial.refused_meanwhile(
        trial.prompt(5, 13),
        greedy(trial.long),
        lambda _: trial.engine.set_version(version + 1),
        "a version while a request runs",
    )
    require(
        set(output.versions) == {version}, f"its tokens carry the versions {sorted(set(output.versions))}"
    )
    trial.compare(trial.prompt(5, 13), output)


@check("requests go on with new weights", needs="update_in_flight")
async def update_in_flight(trial: Trial) -> None:
    """Held, given new weights, and let go on: tokens before the update are the old model's, tokens after it are the new
    one's over all tokens so far, with nothing left in the cache of what the old one computed; versions say which."""
    prompts = [trial.prompt(length, 14 + length) for length in (5, 9, _SHARED)]
    asked = [
        trial.begin(prompt, sampled(14, n, max_tokens=trial.long // 2)) for n, prompt in enumerate(prompts)
    ]
    for one in asked:
        await one.tokens(3)
    old = trial.engine.version
    try:
        await trial.engine.pause()
        trial.judge.change(3)
        new = await trial.load()
        await trial.engine.resume()
        outputs = [await one.task for one in asked]
        for prompt, output in zip(prompts, outputs, strict=True):
            count = output.versions.count(old)
            wanted = (old,) * count + (new,) * (trial.long // 2 - count)
            require(
                0 < count < trial.long // 2 and output.versions == wanted,
                f"updated from {old} to {new} under way, the tokens carry {output.versions}",
            )
            trial.compare([*prompt, *output.token_ids[:count]], _slice(output, count, None))
            trial.judge.restore()
            trial.compare(prompt, _slice(output, 0, count))
            trial.judge.change(3)
    finally:
        trial.judge.restore()
        await trial.load()


def _slice(output: TokenOutput, start: int, end: int | None) -> TokenOutput:
    part = slice(start, end)
    return dataclasses.replace(
        output,
        token_ids=output.token_ids[part],
        log_probs=output.log_probs[part],
        versions=output.versions[part],
    )


@check("sleep gives the cache's memory back")
async def sleep(trial: Trial) -> None:
    """By the engine's own number; refused while a request runs. Awake again it generates as before."""
    prompt = trial.prompt(_SHARED, 15)
    before = await trial.refused_meanwhile(
        prompt,
        greedy(trial.long // 2),
        lambda _: trial.engine.sleep(),
        "sleep while a request runs",
    )
    held = await trial.number("cache_bytes")
    require(held > 0, "after a request the engine says that its cache takes no memory")
    await trial.engine.sleep()
    left = await trial.number("cache_bytes")
    await trial.engine.wake_up()
    require(left < held, f"asleep, the cache still takes {left:g} of {held:g} bytes")
    again = await trial.ask(prompt, greedy(trial.long // 2))
    trial.compare(prompt, again)
    require(again.token_ids == before.token_ids, "awake again, greedy decoding gives other tokens")


@check("sleep(2) gives the memory of the weights back", needs="frees_weights")
async def deep_sleep(trial: Trial) -> None:
    """By the engine's own number; awake again it holds nothing until weights are written."""
    prompt = trial.prompt(6, 16)
    before = await trial.ask(prompt, greedy(8))
    held = await trial.number("weights_bytes")
    await trial.engine.sleep(2)
    left = await trial.number("weights_bytes")
    await trial.engine.wake_up()
    await trial.load()
    require(left < held / 2, f"asleep, the weights still take {left:g} of {held:g} bytes")
    again = await trial.ask(prompt, greedy(8))
    require(again.token_ids == before.token_ids, "with its weights again, greedy decoding gives other tokens")


@check("sleep(2) without frees_weights is refused")
async def deep_sleep_refused(trial: Trial) -> None:
    """The weights stay, and are used."""
    if "frees_weights" in trial.engine.abilities:
        raise Absent("it is able to")
    await refused(trial.engine.sleep(2), "sleep(2)")
    require(len((await trial.ask([0, 1], greedy(2))).token_ids) == 2, "it generates no more")


@check("the samples of a prompt compute it once")
async def prefix_reuse(trial: Trial) -> None:
    """By the engine's count of computed prompt tokens; after `flush_cache` it is computed anew.

    An engine that shares whole blocks of its cache says their size.
    """
    prompt = trial.prompt(_SHARED + 2 * await _block_tokens(trial), 17)
    for _ in range(2):
        await trial.engine.flush_cache()
        before = await trial.number("prefilled_tokens")
        outputs = await trial.ask_all([(prompt, sampled(17, n, max_tokens=4)) for n in range(6)])
        computed = await trial.number("prefilled_tokens") - before
        require(
            len(prompt) - 1 <= computed < 2 * len(prompt),
            f"six samples of a prompt of {len(prompt)} tokens after a flush: {computed:g} tokens were computed",
        )
        for output in outputs:
            trial.compare(prompt, output)


@check("a later turn computes only what is new")
async def turn_reuse(trial: Trial) -> None:
    """The second turn begins with the first one's prompt and answer. An engine need not do this."""
    first = trial.prompt(_SHARED + 2 * await _block_tokens(trial), 18)
    answer = await trial.ask(first, sampled(18, max_tokens=12))
    second = [*first, *answer.token_ids, *trial.prompt(5, 19)]
    before = await trial.number("prefilled_tokens")
    output = await trial.ask(second, greedy(6))
    computed = await trial.number("prefilled_tokens") - before
    trial.compare(second, output)
    if computed >= len(second):
        raise Absent("every turn computes its whole prompt")


async def _block_tokens(trial: Trial) -> int:
    """Tokens in a block of the cache, of an engine that shares no less."""
    return int((await trial.engine.health()).get("block_tokens", 0))


WEIGHTS = (
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
