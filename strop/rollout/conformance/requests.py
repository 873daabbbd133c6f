"""Checks of how requests live: heard of, aborted, cancelled, held, refused; and of whether the engine itself does."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from strop.rollout.conformance.generation import greedy, sampled
from strop.rollout.conformance.trial import Absent, Breach, Running, Trial, check, refused, require
from strop.rollout.types import Sampling

SHORT_S = 0.3
"""How long a held request must stay where it is."""


@check("tokens are heard of as they are sampled")
async def on_token(trial: Trial) -> None:
    """One call per token, in order, with what the whole says in the end; and before the end."""
    running = trial.begin(trial.prompt(5, 1), sampled(1, max_tokens=trial.long))
    await running.tokens(1)
    early = not running.task.done()
    output = await running.task
    whole = list(zip(output.token_ids, output.log_probs, output.versions, strict=True))
    require(
        running.heard == whole,
        f"{len(running.heard)} calls of on_token, the answer has {len(whole)} tokens",
    )
    require(early, f"the first of {len(whole)} tokens is heard of when the whole is there")


@check("an aborted request returns what it has and can be continued")
async def abort(trial: Trial) -> None:
    """The others go on, ids that do not run are passed over; with `Sampling.position` the rest follows: the very
    tokens of an undisturbed request, where the engine continues a stream."""
    prompt, other = trial.prompt(6, 2), trial.prompt(4, 3)
    how = sampled(2, max_tokens=trial.long)
    whole = await trial.ask(prompt, how)
    running, beside = trial.begin(prompt, how), trial.begin(other, greedy(trial.long))
    await running.tokens(3)
    await trial.engine.abort([running.request_id, "conformance-unknown"])
    part = await running.task
    count = len(part.token_ids)
    require(part.stop_reason == "aborted", f"an aborted request ends by {part.stop_reason!r}")
    require(3 <= count < trial.long, f"aborted after at least 3 of {trial.long} tokens, it returns {count}")
    trial.compare(prompt, part)
    rest_of = dataclasses.replace(how, max_tokens=trial.long - count, position=count)
    continued = [*prompt, *part.token_ids]
    rest = await trial.ask(continued, rest_of)
    trial.compare(continued, rest)
    if "continues_stream" in trial.engine.abilities:
        require(
            part.token_ids + rest.token_ids == whole.token_ids,
            f"{count} tokens and the {len(rest.token_ids)} that continue them are not those of an undisturbed request",
        )
    untouched = await beside.task
    require(untouched.stop_reason == "length", f"the request beside it ended by {untouched.stop_reason!r}")


@check("abort without ids ends all")
async def abort_all(trial: Trial) -> None:
    """Those that run and those that wait."""
    asked = [trial.begin(trial.prompt(4, n), sampled(n, max_tokens=trial.long)) for n in range(6)]
    await asked[0].tokens(1)
    await trial.engine.abort()
    reasons = {(await one.task).stop_reason for one in asked}
    require(reasons == {"aborted"}, f"the requests ended by {sorted(reasons)}")


@check("a cancelled caller ends its request")
async def cancellation(trial: Trial) -> None:
    """Its place is free soon, and its id with it."""
    running = trial.begin(trial.prompt(4, 4), sampled(4, max_tokens=trial.long))
    await running.tokens(1)
    running.task.cancel()
    await asyncio.wait([running.task])
    require(running.task.cancelled(), "the cancelled request went on to its end")
    async with asyncio.timeout(10):
        while await trial.number("running") + await trial.number("waiting") > 0:
            await asyncio.sleep(0.01)
    output = await trial.ask(trial.prompt(4, 4), greedy(2), request_id=running.request_id)
    require(len(output.token_ids) == 2, "its id cannot be used again")


@check("pause holds requests and resume lets them go on")
async def pause(trial: Trial) -> None:
    """Nothing is lost or changed, also for requests that come meanwhile; health answers, and says that it is paused."""
    prompt = trial.prompt(5, 5)
    whole = await trial.ask(prompt, greedy(trial.long))
    running = trial.begin(prompt, greedy(trial.long))
    await running.tokens(2)
    await trial.engine.pause()
    try:
        late = trial.begin(prompt, greedy(4))
        await asyncio.sleep(SHORT_S / 3)  # what was on its way when the pause began
        held = len(running.heard)
        await asyncio.sleep(SHORT_S)
        require(not running.task.done(), f"a request of {trial.long} tokens ended during the pause")
        require(len(running.heard) == held, f"{len(running.heard) - held} tokens came during the pause")
        require(not late.heard, "a request sent during the pause has tokens")
        require(await trial.number("paused") == 1.0, "health does not say that the engine is paused")
    finally:
        await trial.engine.resume()
    await _unchanged(trial, prompt, running, whole.token_ids)
    require(
        (await late.task).token_ids == whole.token_ids[:4],
        "a request sent during the pause gets other tokens",
    )


async def _unchanged(trial: Trial, prompt: list[int], running: Running, wanted: tuple[int, ...]) -> None:
    output = await running.task
    trial.compare(prompt, output)
    if "keyed" in trial.engine.abilities:
        require(output.token_ids == wanted, "a request that was held has other tokens than one that was not")


@check("malformed requests are refused")
async def malformed(trial: Trial) -> None:
    """With a ValueError, alone: the engine goes on. Empty, outside the vocabulary, too long, an id that runs."""
    vocab = trial.judge.vocab_size
    for ids, why in (
        ([], "an empty prompt"),
        ([3, vocab], f"token {vocab} of a vocabulary of {vocab}"),
        ([-1, 3], "token -1"),
    ):
        await refused(trial.ask(ids, greedy(2)), why)
    longest = trial.judge.max_positions
    if longest is not None and longest <= 1 << 17:
        too_long = trial.ask(trial.prompt(longest - 2, 0), greedy(4))
        await refused(too_long, f"{longest + 2} tokens in a model of {longest} positions")
    output = await trial.refused_meanwhile(
        trial.prompt(4, 6),
        greedy(trial.long),
        lambda running: trial.ask(trial.prompt(4, 7), greedy(2), request_id=running),
        "an id that is running",
    )
    require(len(output.token_ids) == trial.long, "the request with that id did not go on")


@check("health generates a token")
async def liveness(trial: Trial) -> None:
    """A real one: the count of sampled tokens grows. Two checks at once do not meet; requests beside it go on."""
    before = await trial.number("decoded_tokens")
    running = trial.begin(trial.prompt(4, 8), greedy(trial.long))
    await running.tokens(1)
    await asyncio.gather(trial.engine.health(), trial.engine.health())
    require(len((await running.task).token_ids) == trial.long, "a request beside the health check was cut")
    grown = await trial.number("decoded_tokens") - before
    require(
        grown >= trial.long + 3,
        f"{grown:g} tokens were sampled by {trial.long} of a request and 3 of health checks",
    )


@check("an engine that cannot work says so")
async def damage(trial: Trial) -> None:
    """After what `Subject.damage` does, health and requests raise within their deadline."""
    if trial.damage is None:
        raise Absent("nothing here can make it fail")
    trial.damage()
    calls: tuple[tuple[str, Callable[[], Awaitable[object]]], ...] = (
        ("health", trial.engine.health),
        ("a request", lambda: trial.ask([0], greedy(2))),
    )
    for what, call in calls:
        try:
            await call()
        except Exception as error:  # noqa: BLE001  (whatever it is, it must say what)
            require(
                bool(str(error)),
                f"{what} of a damaged engine fails without a sentence ({type(error).__name__})",
            )
        else:
            raise Breach(f"{what} of a damaged engine succeeds")


@check("close ends everything")
async def close(trial: Trial) -> None:
    """Requests return or raise, and a second call does nothing."""
    asked = []
    if trial.damage is None:
        asked = [trial.begin(trial.prompt(4, n), Sampling(key=n, max_tokens=trial.long)) for n in range(3)]
        await asked[0].tokens(1)
    await trial.engine.close()
    if asked:
        _, open_still = await asyncio.wait([one.task for one in asked], timeout=10)
        require(not open_still, f"{len(open_still)} requests are still open after close")
        for one in asked:
            one.task.exception()
    await trial.engine.close()


REQUESTS = (on_token, abort, abort_all, cancellation, pause, malformed, liveness)
LAST = (damage, close)
"""After these the engine is of no more use."""
