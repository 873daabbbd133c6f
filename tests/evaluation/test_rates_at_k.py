"""pass@k and maj@k of a validation, and how often their intervals hold the truth."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from strop.evaluation.pass_at_k import maj_at, pass_at
from strop.rewards import Outcome
from strop.trainer.validation import summarize_validation
from strop.workers.reports import EpisodeReport


def reports(passed: list[list[bool]], preds: list[list[str]] | None = None) -> list[EpisodeReport]:
    found = []
    for row, some in enumerate(passed):
        for index, one in enumerate(some):
            parts: dict[str, float | str | bool] = {"acc": one}
            if preds is not None:
                parts["pred"] = preds[row][index]
            outcome = Outcome(kind="score", score=float(one), parts=parts)
            found.append(
                EpisodeReport(
                    uid=f"val-{row:06d}", sample_index=index, data_source="x", num_prompt_tokens=1, outcome=outcome
                )
            )  # fmt: skip
    return found


def test_by_hand() -> None:
    """Of 4 answers 2, 0 and 4 pass: pass@2 is 1 - 1/6, 0 and 1; the votes of all are a tie, wrong and right."""
    passed = [[True, True, False, False], [False] * 4, [True] * 4]
    preds = [["7", "7", "8", "8"], ["3", "3", "3", ""], ["5"] * 4]
    found = summarize_validation(reports(passed, preds))
    assert list(pass_at(found)) == [2, 4]
    assert pass_at(found)[2].rate == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert pass_at(found)[4].rate == pytest.approx(2 / 3)
    assert maj_at(found)[4].rate == pytest.approx(0.5)
    low, high = pass_at(found)[4].low, pass_at(found)[4].high
    assert 0 < low < 2 / 3 < high < 1
    assert maj_at(summarize_validation(reports(passed))) == {}, "no answer was extracted"
    assert pass_at(summarize_validation(reports([[True], [False]]))) == {}


def test_an_answer_without_a_prediction_does_not_win_for_another() -> None:
    """Three answers from which nothing was extracted outvote a right one; they do not pass."""
    found = summarize_validation(reports([[False, False, False, True]], [["", "", "", "4"]]))
    assert maj_at(found)[4].rate == 0.0
    assert maj_at(found)[2].rate == pytest.approx(0.25), "3 of 6 pairs are ties"


def test_prompts_of_sources_without_predictions_do_not_vote() -> None:
    """The vote is right; where nothing is extracted half of the answers pass, which is no vote."""
    voting = reports([[True, True, False, False]], [["7", "7", "8", "9"]])
    other = [
        replace(report, uid="val-000009", data_source="y")
        for report in reports([[True, True, False, False]], [[""] * 4])
    ]
    found = summarize_validation([*voting, *other])
    assert maj_at(found)[4].rate == 1.0
    assert pass_at(found)[4].rate == 1.0, "of all prompts"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_ninety_five_of_a_hundred_intervals_hold_the_truth(shape: float) -> None:
    """Prompts of difficulty Beta(a, a), 8 answers each; the truth of pass@4 is 1 - B(a, a + 4) / B(a, a)."""
    draw = random.Random(5)
    miss = math.prod((shape + i) / (2 * shape + i) for i in range(4))
    held_pass = held_rate = 0
    for _ in range(300):
        passed = [
            [draw.random() < difficulty for _ in range(8)]
            for difficulty in (draw.betavariate(shape, shape) for _ in range(50))
        ]
        found = summarize_validation(reports(passed))
        rate = pass_at(found)[4]
        held_pass += rate.low <= 1 - miss <= rate.high
        low, high = found.interval()
        held_rate += low <= 0.5 <= high
    assert 273 <= held_pass <= 299, held_pass
    assert 273 <= held_rate <= 299, held_rate
