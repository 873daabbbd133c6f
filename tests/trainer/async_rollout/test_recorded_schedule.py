"""Requests that wait for the versions that sampled them."""

from __future__ import annotations

import asyncio
import sys

import pytest

from strop.workers.async_rollout.recorded_schedule import RecordedSchedule


async def is_over(task: asyncio.Task[object]) -> bool:
    """Whether it has ended once everybody had a turn."""
    for _ in range(5):
        await asyncio.sleep(0)
    return task.done()


@pytest.fixture
def schedule() -> RecordedSchedule:
    """Two samples: the first has two tokens of version 0 and three of version 2, then a turn of version 2."""
    made = RecordedSchedule(0)
    made.follow("p", {"0#0": [[0, 2], [2, 3]], "0#1": [[2, 4]], "1#0": [[0, 1]]})
    return made


def test_a_request_has_the_tokens_of_a_version_and_waits_for_the_next_one(schedule: RecordedSchedule) -> None:
    async def go() -> None:
        assert await schedule.allowance("p/0#0", 0) == 2
        assert await schedule.allowance("p/0#0", 1) == 1
        rest = asyncio.create_task(schedule.allowance("p/0#0", 2))
        assert not await is_over(rest)
        await schedule.reach(1)
        assert not await is_over(rest), "it is the version after this one"
        await schedule.reach(2)
        assert await rest == sys.maxsize, "the last tokens come until it stops"
        assert await schedule.allowance("other/0#0", 7) == sys.maxsize, "nothing is recorded of it"

    asyncio.run(go())


def test_new_weights_wait_for_what_the_old_ones_sampled(schedule: RecordedSchedule) -> None:
    async def go() -> None:
        waiting = asyncio.create_task(schedule.caught_up())
        schedule.heard("p/0#0", 1)
        assert not await is_over(waiting)
        schedule.heard("p/0#0", 2)
        assert not await is_over(waiting), "the other sample has none"
        schedule.answered("p/1#0")
        assert await is_over(waiting)
        await schedule.reach(2)
        again = asyncio.create_task(schedule.caught_up())
        schedule.heard("p/0#0", 5)
        assert not await is_over(again), "its next turn is of this version too"
        schedule.ended("p/0")
        assert await is_over(again), "it asks no more"

    asyncio.run(go())
