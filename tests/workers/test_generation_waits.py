"""Waits of generation, on samples whose times are worked out by hand."""

from __future__ import annotations

import pytest

from strop.workers.episodes import EpisodeTimes
from strop.workers.generation_waits import generation_waits, sum_of_waits
from strop.workers.reports import EpisodeReport


def report(played_s: float, num_tokens: int, scored_s: float = 0.0) -> EpisodeReport:
    return EpisodeReport(
        uid="e0-000000", sample_index=0, data_source="", num_prompt_tokens=1, num_response_tokens=num_tokens,
        times=EpisodeTimes(played_s, scored_s or played_s),
    )  # fmt: skip


def test_tail_is_the_time_below_the_full_rate() -> None:
    # Two samples of 10 tokens/s each. Until the first ends, at 1 s, the rate is 20/s, at which all 40 tokens take 2 s.
    assert generation_waits([report(1.0, 10), report(3.0, 30)]) == {
        "tail": pytest.approx(1.0),
        "rewards": 0.0,
    }


def test_samples_that_end_together_have_no_tail() -> None:
    assert generation_waits([report(2.0, 10), report(2.0, 30)])["tail"] == pytest.approx(0.0)


def test_one_of_eight_that_goes_on_alone() -> None:
    # Seven of 1 s and one of 9 s, all at 8 tokens/s: 64/s at first, 128 tokens in all, so 2 s of 9 at full rate.
    reports = [*[report(1.0, 8)] * 7, report(9.0, 72)]
    assert generation_waits(reports)["tail"] == pytest.approx(7.0)


def test_wait_for_rewards_is_from_the_last_token_to_the_last_score() -> None:
    # The sample that was scored last ended first.
    assert generation_waits([report(1.0, 10, 6.5), report(3.0, 30, 3.5)])["rewards"] == pytest.approx(3.5)


def test_samples_that_nobody_timed_are_left_out() -> None:
    assert generation_waits([report(0.0, 10)]) == {}
    assert generation_waits([report(0.0, 10), report(2.0, 10)]) == {
        "tail": pytest.approx(0.0),
        "rewards": 0.0,
    }
    assert generation_waits([report(2.0, 0)]) == {"tail": 0.0, "rewards": 0.0}


def test_waits_of_rounds_add_up() -> None:
    assert sum_of_waits([{"tail": 1.0}, {}, {"tail": 0.5, "rewards": 2.0}]) == {"tail": 1.5, "rewards": 2.0}
