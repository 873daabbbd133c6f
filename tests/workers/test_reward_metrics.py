"""Parts of rewards and what scoring used up, as numbers of a step."""

from __future__ import annotations

import math

import pytest

from strop.workers.metrics import reward_outcome_metrics, reward_part_metrics, reward_usage_metrics


def test_parts_are_averaged_over_the_samples_that_have_them() -> None:
    parts = [{"format": 1.0, "pred": "x"}, {"format": 0.0, "bonus": 2}, {"format": True, "odd": math.nan}]
    assert reward_part_metrics(["a", "a", "a"], parts) == {
        "reward/format/mean": pytest.approx(2 / 3), "reward/bonus/mean": 2.0,
    }  # fmt: skip


def test_parts_are_split_by_source_where_there_are_several() -> None:
    found = reward_part_metrics(["a", "b", "b"], [{"acc": 1.0}, {"acc": 0.0}, {"acc": 0.5, "x": 3.0}])
    assert found == {
        "reward/acc/mean": 0.5, "reward/a/acc/mean": 1.0, "reward/b/acc/mean": 0.25, "reward/x/mean": 3.0,
        "reward/b/x/mean": 3.0,
    }  # fmt: skip
    assert reward_part_metrics([], []) == {}


def test_usage_is_added_over_samples() -> None:
    usage = [{"judge/requests": 2.0, "judge/cost": 0.25}, {}, {"judge/requests": 1.0}]
    assert reward_usage_metrics(usage) == {"reward/judge/requests": 3.0, "reward/judge/cost": 0.25}


def test_shares_are_left_out_where_nothing_was_scored() -> None:
    assert reward_outcome_metrics([]) == {
        "reward/ok": 0.0, "reward/error": 0.0, "reward/timeout": 0.0, "reward/infrastructure": 0.0,
    }  # fmt: skip
