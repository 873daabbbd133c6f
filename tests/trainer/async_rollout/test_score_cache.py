"""Scores that outlive a process."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import RewardConfig, RewardPool
from strop.workers.async_rollout.score_cache import ScoreCache

COUNTED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open({path!r}, "a") as file:
        file.write(solution_str + "\\n")
    return {{"score": float(len(solution_str)), "acc": True}}
"""
PROMPT = Prompt(uid="e0-3", row=3, token_ids=(1, 2), messages=(), data_source="numbers", ground_truth="5")


def answer(*ids: int, index: int = 0) -> Trajectory:
    empty = Trajectory(uid=PROMPT.uid, sample_index=index, prompt_ids=PROMPT.token_ids)
    return empty.with_sampled(ids, [-1.0] * len(ids), [0] * len(ids)).finish("stop")


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "asked.txt"
    file.touch()
    (tmp_path / "reward.py").write_text(COUNTED.format(path=str(file)))
    return file


def test_what_an_earlier_process_scored_is_not_scored_again(asked: Path) -> None:
    async def play() -> None:
        async with RewardPool(RewardConfig(path=str(asked.parent / "reward.py"), num_workers=1)) as pool:
            before = ScoreCache(pool)
            before.restore(PROMPT.uid, {})
            first = await before.score(PROMPT, answer(5), "a")
            assert (first.score, first.parts) == (1.0, {"acc": True})
            await before.score(PROMPT, answer(6, index=1), "bb")
            notes = before.saved()[PROMPT.uid]

            after = ScoreCache(pool)
            after.restore(PROMPT.uid, notes)
            assert await after.score(PROMPT, answer(5), "a") == first
            assert asked.read_text() == "a\nbb\n", "nothing was asked"
            assert (await after.score(PROMPT, answer(6, 7, index=1), "ccc")).score == 3.0, (
                "it came out otherwise"
            )
            assert (await after.score(PROMPT, answer(8, index=2), "dddd")).score == 4.0, "it had none"
            assert sorted(after.saved()[PROMPT.uid]) == ["0", "1", "2"]
            assert after.saved()[PROMPT.uid]["1"].outcome.score == 3.0

    asyncio.run(play())
    assert asked.read_text() == "a\nbb\nccc\ndddd\n"


def test_notes_are_kept_of_what_is_followed_until_it_is_forgotten(asked: Path) -> None:
    async def play() -> None:
        async with RewardPool(RewardConfig(path=str(asked.parent / "reward.py"), num_workers=1)) as pool:
            cache = ScoreCache(pool)
            await cache.score(PROMPT, answer(5), "a")
            assert cache.saved() == {}
            cache.restore(PROMPT.uid, {})
            other = dataclasses.replace(PROMPT, uid="e0-4")
            cache.restore(other.uid, {})
            await cache.score(PROMPT, answer(5), "a")
            assert {uid: len(own) for uid, own in cache.saved().items()} == {"e0-3": 1, "e0-4": 0}
            cache.forget([PROMPT.uid, "e9-9"])
            assert cache.saved() == {"e0-4": {}}

    asyncio.run(play())


def test_facts_that_a_score_may_depend_on_tell_samples_apart(asked: Path) -> None:
    async def play() -> None:
        async with RewardPool(RewardConfig(path=str(asked.parent / "reward.py"), num_workers=1)) as pool:
            before = ScoreCache(pool)
            before.restore(PROMPT.uid, {})
            await before.score(PROMPT, answer(5), "a")
            after = ScoreCache(pool)
            after.restore(PROMPT.uid, before.saved()[PROMPT.uid])
            await after.score(PROMPT, dataclasses.replace(answer(5), extra={"solved": True}), "a")

    asyncio.run(play())
    assert asked.read_text() == "a\na\n"
