"""Time that is counted in engine steps."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from strop.trainer.async_rollout.step_clock import StepClock
from strop.trainer.async_rollout.virtual_time import Distribution, VirtualTime, read_distribution


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


def test_distributions_are_what_their_names_say(tmp_path: Path) -> None:
    normal = read_distribution("k", "lognormal(200, 0.5)")
    assert normal == Distribution(median=200.0, sigma=0.5)
    assert normal.at(0.5) == 200
    assert normal.at(0.8413447460685429) == round(200 * math.exp(0.5)), "one sigma above"
    (tmp_path / "steps.txt").write_text("30\n10\n\n20\n")
    recorded = read_distribution("k", str(tmp_path / "steps.txt"))
    assert recorded is not None
    assert [recorded.at(share) for share in (0.01, 0.32, 0.34, 0.65, 0.68, 0.999)] == [10, 10, 20, 20, 30, 30]
    assert read_distribution("k", "") is None


def test_how_much_later_a_sample_ends_depends_on_seed_prompt_and_number() -> None:
    long = VirtualTime(
        seed=1, lengths=Distribution(recorded=(40.0,)), latencies=Distribution(recorded=(5.0,))
    )
    assert long.steps_after("e0-1", 0, num_tokens=30) == 15
    assert long.steps_after("e0-1", 0, num_tokens=90) == 5, "an answer is not shorter than its tokens"
    drawn = VirtualTime(seed=1, latencies=Distribution(median=100.0, sigma=1.0))
    names = [(uid, index) for uid in ("e0-1", "e0-2") for index in range(200)]
    steps = [drawn.steps_after(*name, num_tokens=3) for name in names]
    assert steps == [drawn.steps_after(*name, num_tokens=9) for name in names]
    assert sorted(steps)[len(steps) // 2] == pytest.approx(100, rel=0.3)
    other = VirtualTime(seed=2, latencies=Distribution(median=100.0, sigma=1.0))
    assert steps != [other.steps_after(*name, num_tokens=3) for name in names]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("lognormal(0, 1)", "a log-normal distribution has a median above 0 and a sigma"),
        ("lognormal(5)", "a log-normal distribution has a median above 0 and a sigma"),
        ("lognormal(a, 1)", "which has something that is no number of steps"),
        ("lognormal(5, -1)", "which has something that is no number of steps"),
        ("none.txt", "which cannot be read .*it is lognormal"),
    ],
)
def test_what_is_no_distribution_is_refused(given: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.clock_lengths is .*{sentence}"):
        read_distribution("trainer.clock_lengths", given)


@pytest.mark.parametrize(
    ("text", "sentence"), [("", "a file without a number"), ("3\nx\n", "no number of steps")]
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "steps.txt").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_distribution("trainer.clock_lengths", str(tmp_path / "steps.txt"))
