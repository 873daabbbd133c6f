"""The clock of engine steps that tests use."""

from __future__ import annotations

import asyncio
import math

import pytest
from virtual_clock import Delays, Distribution, StepClock


def test_where_nothing_is_generated_time_passes_at_once_in_order() -> None:
    async def play() -> list[tuple[int, str]]:
        clock, woken = StepClock(), list[tuple[int, str]]()

        async def sleeper(name: str, *naps: int) -> None:
            for steps in naps:
                await clock.sleep(name, steps)
                woken.append((clock.now, name))
            clock.end()

        clock.begin(3)
        async with asyncio.timeout(5):
            await asyncio.gather(sleeper("c", 4, 3), sleeper("b", 7), sleeper("a", 2, 0, 5))
        return woken

    assert asyncio.run(play()) == [(2, "a"), (2, "a"), (4, "c"), (7, "a"), (7, "b"), (7, "c")]


def test_somebody_asleep_wakes_between_two_steps_of_the_engine() -> None:
    async def play() -> list[object]:
        clock, seen = StepClock(), list[object]()

        async def engine() -> None:
            for _ in range(4):
                await clock.gate()
                seen.append(clock.now)
            clock.num_asked = 0

        async def sleeper() -> None:
            await clock.sleep("a", 2)
            seen.append("awake")
            await asyncio.sleep(0.01)  # somebody is busy: no step is taken
            seen.append("asleep again")
            await clock.sleep("a", 1)
            seen.append("awake")
            clock.end()

        clock.begin()
        clock.num_asked = 1
        async with asyncio.timeout(5):
            await asyncio.gather(engine(), sleeper())
        return seen

    assert asyncio.run(play()) == [1, 2, "awake", "asleep again", 3, "awake", 4]


def test_who_is_cancelled_in_its_sleep_is_forgotten() -> None:
    async def play() -> int:
        clock = StepClock()
        clock.begin(2)
        early, late = (asyncio.create_task(clock.sleep(name, n)) for name, n in (("a", 5), ("b", 9)))
        await asyncio.sleep(0)
        early.cancel()
        async with asyncio.timeout(5):
            await late
        return clock.now

    assert asyncio.run(play()) == 9


def test_distributions_are_what_their_names_say() -> None:
    normal = Distribution(median=200.0, sigma=0.5)
    assert normal.at(0.5) == 200
    assert normal.at(0.8413447460685429) == round(200 * math.exp(0.5)), "one sigma above"
    recorded = Distribution(recorded=(10.0, 20.0, 30.0))
    assert [recorded.at(share) for share in (0.01, 0.32, 0.34, 0.65, 0.68, 0.999)] == [10, 10, 20, 20, 30, 30]


def test_how_much_later_a_sample_ends_depends_on_seed_prompt_and_number() -> None:
    long = Delays(seed=1, lengths=Distribution(recorded=(40.0,)), latencies=Distribution(recorded=(5.0,)))
    assert long.steps_after("e0-1", 0, num_tokens=30) == 15
    assert long.steps_after("e0-1", 0, num_tokens=90) == 5, "an answer is not shorter than its tokens"
    drawn = Delays(seed=1, latencies=Distribution(median=100.0, sigma=1.0))
    names = [(uid, index) for uid in ("e0-1", "e0-2") for index in range(200)]
    steps = [drawn.steps_after(*name, num_tokens=3) for name in names]
    assert steps == [drawn.steps_after(*name, num_tokens=9) for name in names]
    assert sorted(steps)[len(steps) // 2] == pytest.approx(100, rel=0.3)
    other = Delays(seed=2, latencies=Distribution(median=100.0, sigma=1.0))
    assert steps != [other.steps_after(*name, num_tokens=3) for name in names]
