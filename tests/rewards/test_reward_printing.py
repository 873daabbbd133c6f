"""What a reward function prints reaches the person, and the log of the run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from reward_cases import make_prompt, write_reward

from strop.rewards import RewardConfig, RewardPool
from strop.rewards.stdout_capture import MAX_LINE_BYTES, SHOWN_LINES, LineStream, OutputLog

PRINTS = """
    import sys
    def compute_score(solution_str, **_):
        print("scoring", solution_str)
        if solution_str == "bad":
            raise RuntimeError("no")
        return 1.0
"""


def test_prints_are_shown_up_to_a_limit_and_all_logged_with_tracebacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RewardConfig(path=write_reward(tmp_path, PRINTS), num_workers=1)
    answers = [*(f"a{number}" for number in range(SHOWN_LINES + 5)), "bad"]

    async def score() -> None:
        async with RewardPool(config, logs=tmp_path / "logs") as pool:
            await asyncio.gather(*(pool.score_text(make_prompt(), answer) for answer in answers))

    with caplog.at_level(logging.WARNING):
        asyncio.run(score())
    shown = [record.getMessage() for record in caplog.records]
    assert shown == [
        *(f"reward prints: scoring a{number}" for number in range(SHOWN_LINES)),
        f"reward prints: what follows is in {tmp_path / 'logs' / 'reward.log'}",
    ]
    logged = (tmp_path / "logs" / "reward.log").read_text().splitlines()
    assert [line for line in logged if line.startswith("scoring")] == [
        f"scoring {answer}" for answer in answers
    ]
    assert "RuntimeError: no" in logged


def test_lines_are_joined_over_reads_and_cut_where_they_never_end() -> None:
    taken: list[str] = []
    lines = LineStream(taken.append)
    lines.data_received(b"one\r\ntw")
    lines.data_received(b"o\n" + b"x" * (MAX_LINE_BYTES + 1))
    lines.data_received(b"\xff")
    lines.connection_lost(None)
    assert taken == ["one", "two", "x" * (MAX_LINE_BYTES + 1), "\\xff"]


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    printed = OutputLog(tmp_path / "no" / "logs" / "reward.log")
    printed.take("a", is_shown=False)
    printed.take("b", is_shown=False)
    printed.close()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "what reward functions print is not logged"
    ]
