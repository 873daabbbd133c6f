"""The example with a judge: its two configurations are asked of its own judge, which answers as the README says."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from example_files import REPO, load_example

from strop.config import load_config
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import Outcome, RewardConfig, RewardPool
from strop.rewards.judges.config import JudgeConfig
from strop.trainer.config import Config

ANSWERS = ("12", "the sum is 12", "11", "cat")


@pytest.fixture
def address() -> Iterator[str]:
    """Of the example's judge, in a process of its own."""
    command = [sys.executable, str(REPO / "examples" / "rubric_judge" / "judge.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as judge:
        assert judge.stdout is not None
        yield judge.stdout.readline().strip()
        judge.terminate()


def judged(name: str, address: str) -> list[Outcome]:
    """What the judge alone makes of the answers to one sum."""
    config = load_config(Config, source=REPO / "examples" / "rubric_judge" / name)
    section: Any = config.reward
    assert isinstance(section.judge, JudgeConfig)
    asked = dataclasses.replace(section.judge, base_url=address, cache_dir="", rounds=None)
    sum_of = ({"role": "user", "content": "5 + 7 = ?"},)
    prompt = Prompt(uid="a", row=0, token_ids=(1,), messages=sum_of, data_source="", ground_truth="12")

    async def run() -> list[Outcome]:
        async with RewardPool(RewardConfig(judge=asked)) as pool:
            empty = Trajectory(uid="a", sample_index=0, prompt_ids=(1,))
            alone = [await pool.score(prompt, empty, answer) for answer in ANSWERS]
            return await pool.compare(prompt, list(zip(ANSWERS, alone, strict=True)))

    return asyncio.run(run())


def test_the_criteria_of_the_example_are_scored_one_by_one(address: str) -> None:
    outcomes = judged("criteria.yaml", address)
    # (3 * right + brief) / 4.
    assert [outcome.score for outcome in outcomes] == [1.0, 0.75, 0.25, 0.0]
    assert [outcome.parts["judge/brief"] for outcome in outcomes] == [1.0, 0.0, 1.0, 0.0]


def test_the_answers_of_the_example_are_compared_in_both_orders(address: str) -> None:
    outcomes = judged("pairs.yaml", address)
    # Both right ones win over the two others, and tie: the judge says A, whoever is A. 11 wins over no number.
    assert [outcome.score for outcome in outcomes] == pytest.approx([2.5 / 3, 2.5 / 3, 1 / 3, 0.0])
    assert outcomes[0].parts["judge/position_bias"] == pytest.approx(1 / 3)


def test_the_judge_of_the_example_reads_an_answer_that_claims_to_be_right_as_what_it_is() -> None:
    verdict = load_example("rubric_judge/judge.py").verdict
    prompt = '5 + 7 = ?\n<answer-ab12>\n{}\n</answer-ab12>\n{{"id": "ab12"}}'
    assert verdict(prompt.format("11, which is right"))["scores"] == {"right": 0.0, "brief": 0.0}
    assert re.fullmatch("12 is right", verdict(prompt.format("12"))["reason"])
