"""Rules of requests (streamed, aborted, cancelled, held, refused), and of an engine that is damaged or closed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest
from rollout.engine_contract.case import EngineCase, Rule, Running, refused
from rollout.engine_contract.generation import greedy, sampled

from strop.rollout.types import Sampling

SHORT_S = 0.3
"""How long a held request must stay where it is."""


async def on_token(case: EngineCase) -> None:
    """Tokens are heard of as they are sampled.

    One call per token, in order, with what the whole says in the end; and before the end.
    """
    running = case.begin(case.prompt(5, 1), sampled(1, max_tokens=case.long))
    await running.tokens(1)
    early = not running.task.done()
    output = await running.task
    whole = list(zip(output.token_ids, output.log_probs, output.versions, strict=True))
    assert running.heard == whole, (
        f"{len(running.heard)} calls of on_token, the answer has {len(whole)} tokens"
    )
    assert early, f"the first of {len(whole)} tokens is heard of when the whole is there"


async def abort(case: EngineCase) -> None:
    """An aborted request returns what it has and can be continued.

    The others go on, ids that do not run are passed over; with `Sampling.position` the rest follows: the very
    tokens of an undisturbed request, where the engine continues a stream.
    """
    prompt, other = case.prompt(6, 2), case.prompt(4, 3)
    how = sampled(2, max_tokens=case.long)
    whole = await case.ask(prompt, how)
    running, beside = case.begin(prompt, how), case.begin(other, greedy(case.long))
    await running.tokens(3)
    await case.engine.abort([running.request_id, "contract-unknown"])
    part = await running.task
    count = len(part.token_ids)
    assert part.stop_reason == "aborted", f"an aborted request ends by {part.stop_reason!r}"
    assert 3 <= count < case.long, f"aborted after at least 3 of {case.long} tokens, it returns {count}"
    case.compare(prompt, part)
    rest_of = dataclasses.replace(how, max_tokens=case.long - count, position=count)
    continued = [*prompt, *part.token_ids]
    rest = await case.ask(continued, rest_of)
    case.compare(continued, rest)
    if "continues_stream" in case.engine.abilities:
        assert part.token_ids + rest.token_ids == whole.token_ids, (
            f"{count} tokens and the {len(rest.token_ids)} that continue them are not those of an undisturbed request"
        )
    untouched = await beside.task
    assert untouched.stop_reason == "length", f"the request beside it ended by {untouched.stop_reason!r}"


async def abort_all(case: EngineCase) -> None:
    """Abort without ids ends all.

    Those that run and those that wait.
    """
    asked = [case.begin(case.prompt(4, n), sampled(n, max_tokens=case.long)) for n in range(6)]
    await asked[0].tokens(1)
    await case.engine.abort()
    reasons = {(await one.task).stop_reason for one in asked}
    assert reasons == {"aborted"}, f"the requests ended by {sorted(reasons)}"


async def cancellation(case: EngineCase) -> None:
    """A cancelled caller ends its request.

    Its place is free soon, and its id with it.
    """
    running = case.begin(case.prompt(4, 4), sampled(4, max_tokens=case.long))
    await running.tokens(1)
    running.task.cancel()
    await asyncio.wait([running.task])
    assert running.task.cancelled(), "the cancelled request went on to its end"
    async with asyncio.timeout(10):
        while await case.number("running") + await case.number("waiting") > 0:
            await asyncio.sleep(0.01)
    output = await case.ask(case.prompt(4, 4), greedy(2), request_id=running.request_id)
    assert len(output.token_ids) == 2, "its id cannot be used again"


async def pause(case: EngineCase) -> None:
    """Pause holds requests and resume lets them go on.

    Nothing is lost or changed, also for requests that come meanwhile; health answers, and says that it is paused.
    """
    prompt = case.prompt(5, 5)
    whole = await case.ask(prompt, greedy(case.long))
    running = case.begin(prompt, greedy(case.long))
    await running.tokens(2)
    await case.engine.pause()
    try:
        late = case.begin(prompt, greedy(4))
        await asyncio.sleep(SHORT_S / 3)  # what was on its way when the pause began
        held = len(running.heard)
        await asyncio.sleep(SHORT_S)
        assert not running.task.done(), f"a request of {case.long} tokens ended during the pause"
        assert len(running.heard) == held, f"{len(running.heard) - held} tokens came during the pause"
        assert not late.heard, "a request sent during the pause has tokens"
        assert await case.number("paused") == 1.0, "health does not say that the engine is paused"
    finally:
        await case.engine.resume()
    await _unchanged(case, prompt, running, whole.token_ids)
    assert (await late.task).token_ids == whole.token_ids[:4], (
        "a request sent during the pause gets other tokens"
    )


async def _unchanged(case: EngineCase, prompt: list[int], running: Running, wanted: tuple[int, ...]) -> None:
    output = await running.task
    case.compare(prompt, output)
    if "keyed" in case.engine.abilities:
        assert output.token_ids == wanted, "a request that was held has other tokens than one that was not"


async def malformed(case: EngineCase) -> None:
    """Malformed requests are refused.

    With a ValueError, alone: the engine goes on. Empty, outside the vocabulary, too long, an id that runs.
    """
    vocab = case.model.vocab_size
    for ids, why in (
        ([], "an empty prompt"),
        ([3, vocab], f"token {vocab} of a vocabulary of {vocab}"),
        ([-1, 3], "token -1"),
    ):
        await refused(case.ask(ids, greedy(2)), why)
    longest = case.model.max_positions
    if longest is not None and longest <= 1 << 17:
        too_long = case.ask(case.prompt(longest - 2, 0), greedy(4))
        await refused(too_long, f"{longest + 2} tokens in a model of {longest} positions")
    output = await case.refused_meanwhile(
        case.prompt(4, 6),
        greedy(case.long),
        lambda running: case.ask(case.prompt(4, 7), greedy(2), request_id=running),
        "an id that is running",
    )
    assert len(output.token_ids) == case.long, "the request with that id did not go on"


async def liveness(case: EngineCase) -> None:
    """Health generates a token.

    A real one: the count of sampled tokens grows. Two checks at once do not meet; requests beside it go on.
    """
    before = await case.number("decoded_tokens")
    running = case.begin(case.prompt(4, 8), greedy(case.long))
    await running.tokens(1)
    await asyncio.gather(case.engine.health(), case.engine.health())
    assert len((await running.task).token_ids) == case.long, "a request beside the health check was cut"
    grown = await case.number("decoded_tokens") - before
    assert grown >= case.long + 3, (
        f"{grown:g} tokens were sampled by {case.long} of a request and 3 of health checks"
    )


async def damage(case: EngineCase) -> None:
    """An engine that cannot work says so.

    After what `StartedEngine.damage` does, health and requests raise within their deadline.
    """
    if case.damage is None:
        pytest.skip("nothing here can make it fail")
    case.damage()
    calls: tuple[tuple[str, Callable[[], Awaitable[object]]], ...] = (
        ("health", case.engine.health),
        ("a request", lambda: case.ask([0], greedy(2))),
    )
    for what, call in calls:
        failure: Exception | None = None
        try:
            await call()
        except Exception as error:  # noqa: BLE001  (whatever it is, it must say what)
            failure = error
        assert failure is not None, f"{what} of a damaged engine succeeds"
        kind = type(failure).__name__
        assert str(failure), f"{what} of a damaged engine fails without a sentence ({kind})"
        assert case.damage_text in str(failure), (
            f"{what} of a damaged engine does not say {case.damage_text!r}, but {kind}: {failure}"
        )


async def close(case: EngineCase) -> None:
    """Close ends everything.

    Requests return or raise, and a second call does nothing.
    """
    asked = []
    if case.damage is None:
        asked = [case.begin(case.prompt(4, n), Sampling(key=n, max_tokens=case.long)) for n in range(3)]
        await asked[0].tokens(1)
    await case.engine.close()
    if asked:
        _, open_still = await asyncio.wait([one.task for one in asked], timeout=10)
        assert not open_still, f"{len(open_still)} requests are still open after close"
        for one in asked:
            one.task.exception()
    await case.engine.close()


REQUESTS: tuple[Rule, ...] = (on_token, abort, abort_all, cancellation, pause, malformed, liveness)
LAST: tuple[Rule, ...] = (damage, close)
"""After these the engine is of no more use."""
