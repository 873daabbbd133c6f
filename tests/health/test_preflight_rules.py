"""The checks before a run, on samples made up for each."""

from __future__ import annotations

from typing import Any

import pytest

from strop.health import Check, Probe, examine
from strop.rewards import Outcome
from strop.workers.reports import EpisodeReport


def report(uid: str, index: int, score: float | None, **changes: Any) -> EpisodeReport:
    outcome = (
        Outcome(kind="error", error="ZeroDivisionError: division by zero")
        if score is None
        else Outcome(kind="score", score=score, parts={"acc": score})
    )
    values: dict[str, Any] = {
        "uid": uid, "sample_index": index, "data_source": "x", "num_prompt_tokens": 5, "num_response_tokens": 10,
        "num_sampled_tokens": 8, "num_turns": 2, "stop_reason": "stop", "outcome": outcome,
    }  # fmt: skip
    return EpisodeReport(**{**values, **changes})


def groups(*scores: list[float | None], **changes: Any) -> list[EpisodeReport]:
    return [report(f"p{i}", j, s, **changes) for i, group in enumerate(scores) for j, s in enumerate(group)]


def checks(reports: list[EpisodeReport], **changes: Any) -> dict[str, Check]:
    values: dict[str, Any] = {
        "reports": reports, "max_response_tokens": 64, "max_failed_share": 0.2, "is_group_relative": True,
        "log_prob_difference": 1e-6, "num_changed_prompts": 0,
    }  # fmt: skip
    return {check.name: check for check in examine(Probe(**{**values, **changes}))}


def test_a_run_that_can_learn_is_fine_and_says_its_numbers() -> None:
    found = checks(groups([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]))
    assert all(check.is_fine and not check.advice for check in found.values())
    assert found["signal"].text == (
        "rewards from 0 to 1, mean 0.5; of 3 groups 1 can teach, 1 are solved by every sample, 1 by none"
    )
    # pass@1 is the mean of 1/2, 1 and 0; pass@2 that of 1, 1 and 0.
    assert found["difficulty"].text.startswith("pass@1 50 % (95 % interval ")
    assert "pass@2 67 %" in found["difficulty"].text
    assert found["loss mask"].text == "48 of 60 response tokens were sampled by the model and are trained"


@pytest.mark.parametrize(
    ("reports", "changes", "name", "sentence"),
    [
        (groups([0.0, 0.0], [0.0, 0.0]), {}, "signal", "every advantage would be 0"),
        (groups([1.0, 1.0], [1.0, 1.0]), {}, "signal", "nothing left to learn: use harder prompts"),
        (groups([0.5], [0.5]), {"is_group_relative": False}, "signal", "every advantage would be 0"),
        (groups([None, None]), {}, "signal", "look at the errors"),
        (groups([1.0, 0.0, None]), {}, "scoring", "mend the reward function"),
        (groups([1.0, 0.0], stop_reason="length"), {}, "length", "raise data.max_response_tokens"),
        (groups([1.0, 0.0], num_sampled_tokens=0), {}, "loss mask", "nothing could be trained"),
        (groups([1.0, 0.0]), {"log_prob_difference": 0.3}, "engine", "algorithm=tis"),
    ],
)
def test_what_stands_in_the_way_is_named_with_advice(
    reports: list[EpisodeReport], changes: dict[str, Any], name: str, sentence: str
) -> None:
    found = checks(reports, **changes)
    assert not found[name].is_fine
    assert sentence in found[name].advice


def test_without_groups_different_rewards_are_enough() -> None:
    found = checks(groups([1.0], [0.0]), is_group_relative=False)
    assert found["signal"].is_fine
    assert found["signal"].text.endswith("2 different rewards")


def test_the_reason_of_failures_is_told() -> None:
    found = checks(groups([1.0, 0.0, None, None]))
    assert "50 % of the samples failed" in found["scoring"].text
    assert "(2): ZeroDivisionError" in found["scoring"].text
