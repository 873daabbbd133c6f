"""RequestStates of what was generated, and episodes that go on from them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from strop.rollout.types import OnToken, Sampling, TokenOutput
from strop.workers.async_rollout.generation_cache import GenerationCache, RequestState
from strop.workers.async_rollout.recorded_schedule import RecordedSchedule

SAMPLING = Sampling(key=5, max_tokens=6, stop_token_ids=(0,))


class Counting:
    """Continues a sequence of numbers by the next ones, and stands still when it is told to."""

    def __init__(self, *, version: int, stops_after: int | None = None) -> None:
        self.asked: list[tuple[str, tuple[int, ...], int, int]] = []
        self.version, self.stops_after = version, stops_after

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        self.asked.append((request_id, tuple(prompt_ids), sampling.max_tokens, sampling.position))
        ids = tuple(range(prompt_ids[-1] + 1, prompt_ids[-1] + 1 + sampling.max_tokens))
        for number, token in enumerate(ids):
            if number == self.stops_after:
                await asyncio.Event().wait()
            if on_token is not None:
                on_token(token, -token / 8, self.version)
        return TokenOutput(
            token_ids=ids,
            log_probs=tuple(-token / 8 for token in ids),
            versions=(self.version,) * len(ids),
            stop_reason="length",
        )


async def interrupted(cache: GenerationCache, request_id: str, prompt: Sequence[int]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await cache.generate(request_id, prompt, SAMPLING)


def test_an_answer_goes_on_where_it_was_and_an_ended_one_is_not_made_again() -> None:
    async def work() -> None:
        before = GenerationCache(Counting(version=1))
        before.restore("e0-1")
        whole = await before.generate("e0-1/0#0", [10], SAMPLING)
        before._client = Counting(version=2, stops_after=2)
        await interrupted(before, "e0-1/0#1", [10, 20])
        kept = (await before.states())["e0-1"]
        client, heard = Counting(version=3), list[tuple[int, float, int]]()
        after = GenerationCache(client)
        after.restore("e0-1", kept)
        assert await after.generate("e0-1/0#0", [10], SAMPLING) == whole
        assert client.asked == []
        found = await after.generate(
            "e0-1/0#1", [10, 20], SAMPLING, on_token=lambda *token: heard.append(token)
        )
        assert client.asked == [("e0-1/0#1~1", (10, 20, 21, 22), 4, 2)], (
            "behind its tokens and its random numbers"
        )
        assert found.token_ids == (21, 22, 23, 24, 25, 26)
        assert found.versions == (2, 2, 3, 3, 3, 3)
        assert found.log_probs == tuple(-token / 8 for token in found.token_ids)
        assert heard == list(zip(found.token_ids, found.log_probs, found.versions, strict=True))
        assert after.differing == []

    asyncio.run(work())


def test_an_agent_that_asks_for_something_else_plays_on_afresh() -> None:
    async def work() -> None:
        before = GenerationCache(Counting(version=1))
        before.restore("e0-1")
        for sample in (0, 1):
            await before.generate(f"e0-1/{sample}#0", [10], SAMPLING)
            await before.generate(f"e0-1/{sample}#1", [30], SAMPLING)
        client = Counting(version=3)
        after = GenerationCache(client)
        after.restore("e0-1", (await before.states())["e0-1"])
        assert (await after.generate("e0-1/0#0", [11], SAMPLING)).versions == (3,) * 6
        assert (await after.generate("e0-1/0#1", [30], SAMPLING)).versions == (3,) * 6, (
            "the rest was forgotten"
        )
        assert (await after.generate("e0-1/1#1", [30], SAMPLING)).versions == (1,) * 6, (
            "that of others was not"
        )
        assert after.differing == ["e0-1/0#0"]
        other = Sampling(key=6, max_tokens=6)
        assert (await after.generate("e0-1/1#0", [10], other)).versions == (3,) * 6, "another random stream"

    asyncio.run(work())


def test_a_second_interruption_loses_nothing_that_was_not_asked_for_yet() -> None:
    async def work() -> None:
        before = GenerationCache(Counting(version=1))
        before.restore("e0-1")
        await before.generate("e0-1/0#0", [10], SAMPLING)
        await before.generate("e0-1/1#0", [20], SAMPLING)
        first = (await before.states())["e0-1"]
        between = GenerationCache(Counting(version=2))
        between.restore("e0-1", first)
        await between.generate("e0-1/1#0", [20], SAMPLING)
        assert (await between.states())["e0-1"] == first
        between.forget(["e0-1"])
        assert await between.states() == {}
        assert (await between.generate("e0-1/1#0", [20], SAMPLING)).versions == (2,) * 6, (
            "no notes are kept of it"
        )

    asyncio.run(work())


def test_what_ended_but_was_not_written_as_ended_ends_without_another_token() -> None:
    async def work() -> None:
        client = Counting(version=3)
        cache = GenerationCache(client)
        probe = GenerationCache(Counting(version=1))
        probe.restore("e0-1")
        await probe.generate("e0-1/0#0", [10], SAMPLING)
        note = (await probe.states())["e0-1"]["e0-1/0#0"]
        stopped = RequestState(asked=note.asked, token_ids=[11, 0], log_probs=[-1.0, -2.0], versions=[1, 1])
        cache.restore("e0-1", {"e0-1/0#0": stopped})
        found = await cache.generate("e0-1/0#0", [10], SAMPLING)
        assert (found.token_ids, found.stop_reason, client.asked) == ((11, 0), "stop", [])

    asyncio.run(work())


def test_nobody_waits_for_the_rest_of_an_answer_that_its_agent_has_ended() -> None:
    async def work() -> None:
        schedule = RecordedSchedule(version=1)
        schedule.follow("e0-1", {"0#0": [[1, 5]]})
        cache = GenerationCache(Counting(version=1, stops_after=2), schedule)
        cache.restore("e0-1")
        await interrupted(cache, "e0-1/0#0", [10])
        async with asyncio.timeout(1):
            await schedule.caught_up()

    asyncio.run(work())
