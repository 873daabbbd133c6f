"""Which answers pass: by `acc`, by a marked function, by a single reward of 0 or 1, or not at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from reward_cases import score_all, write_reward

from strop.evaluation.evaluate import Evaluation
from strop.rewards import Outcome, RewardConfig
from strop.rewards.config import FunctionConfig
from strop.trainer.undecided import UndecidedSources
from strop.trainer.validation import summarize_validation
from strop.workers.reports import EpisodeReport

FUNCTIONS = """
def exact(solution_str, **_):
    return float(solution_str == "12")

def form(solution_str, **_):
    return 1.0

def judged(solution_str, **_):
    return {"score": 3.0, "acc": solution_str == "12", "pred": solution_str}

def graded(solution_str, **_):
    return len(solution_str) / 4

def sometimes(solution_str, **_):
    return None if solution_str == "none" else 1.0
"""


def acc_of(tmp_path: Path, *names: str, texts: tuple[str, ...] = ("12", "x"), **settings: Any) -> list[Any]:
    path = write_reward(tmp_path, FUNCTIONS)
    if len(names) == 1:
        config = RewardConfig(path=path, name=names[0], **settings)
    else:
        functions = tuple(FunctionConfig(path=path, name=name) for name in names)
        config = RewardConfig(functions=functions, **settings)
    return [outcome.parts.get("acc") for outcome in score_all(config, list(texts))]


def test_a_sum_says_nothing_of_passing(tmp_path: Path) -> None:
    """Sums of 2 and 1, of 0.5 and 0.25 more: no verdict, though they are above a half, or exactly 1."""
    assert acc_of(tmp_path, "exact", "form") == [None, None]
    assert acc_of(tmp_path, "form", "graded") == [None, None]


def test_a_function_that_gives_acc_decides(tmp_path: Path) -> None:
    assert acc_of(tmp_path, "judged") == [True, False]
    assert acc_of(tmp_path, "form", "judged") == [True, False]


def test_a_single_reward_of_zero_or_one_is_its_own(tmp_path: Path) -> None:
    """1/4, 2/4, 1 and 0 by length: only the last two could be a verdict."""
    assert acc_of(tmp_path, "exact") == [1.0, 0.0]
    assert acc_of(tmp_path, "graded", texts=("1", "12", "1234", "")) == [None, None, 1.0, 0.0]


def test_a_marked_function_decides_from_its_threshold_on(tmp_path: Path) -> None:
    assert acc_of(tmp_path, "form", "exact", pass_by="exact") == [True, False]
    assert acc_of(tmp_path, "judged", "form", pass_by="form") == [True, True]
    by = {"pass_by": "graded", "pass_threshold": 0.5}
    assert acc_of(tmp_path, "form", "graded", **by) == [True, False]
    assert acc_of(tmp_path, "graded", texts=("1", "12", "123"), **by) == [False, True, True]
    assert acc_of(tmp_path, "form", "sometimes", texts=("x", "none"), pass_by="sometimes") == [True, None]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"pass_by": "exakt"}, "reward.pass_by is 'exakt', which scores nothing here: did you mean 'exact'"),
        ({"pass_threshold": 0.7}, "reward.pass_threshold is 0.7, but reward.pass_by is empty"),
    ],
)
def test_a_mark_that_nothing_has_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RewardConfig(path="r.py", name="exact", **settings)


def reports(*rows: tuple[float | None, object]) -> list[EpisodeReport]:
    return [
        EpisodeReport(
            uid=f"v{number}", sample_index=0, data_source="x", num_prompt_tokens=1, num_sampled_tokens=1,
            outcome=Outcome(kind="error", error="no")
            if score is None
            else Outcome(kind="score", score=score, parts={} if acc is None else {"acc": acc}),  # type: ignore[dict-item]
        )
        for number, (score, acc) in enumerate(rows)
    ]  # fmt: skip


def test_a_validation_has_a_pass_rate_where_each_scored_answer_has_a_verdict() -> None:
    """Two of four pass, one could not be scored and counts as failed; the mean reward is that of three: 4/3."""
    found = summarize_validation(reports((2.0, True), (2.0, 0.75), (0.0, False), (None, None)))
    assert (found.pass_rate, found.num_passed, found.num_unscored) == (0.5, 2, 1)
    assert found.mean_reward == found.metrics["val-core/mean_reward"] == pytest.approx(4 / 3)
    assert (found.score, found.metrics["val-core/pass_rate"]) == (0.5, 0.5)
    assert found.describe().endswith("on 4 answers; 1 could not be scored and count as failed")


def test_without_verdicts_there_is_a_mean_reward_alone() -> None:
    found = summarize_validation(reports((2.0, None), (1.0, True), (None, None)))
    assert (found.pass_rate, found.num_passed, found.interval(), found.score) == (None, None, None, 1.5)
    # Mean 1.5, standard error 1/2 and t = 12.706 with 1 degree of freedom.
    assert found.reward_interval() == pytest.approx((1.5 - 6.353102, 1.5 + 6.353102))
    assert found.describe() == (
        "mean reward 1.5 (95 % interval -4.853 to 7.853) on 3 answers; 1 could not be scored; no pass rate: nothing "
        "says which answers pass (give `acc`, or set reward.pass_by)"
    )
    assert not [name for name in found.metrics if "/acc/" in name or name.endswith("pass_rate")]


def test_sources_that_are_known_to_be_undecided_have_no_pass_rate() -> None:
    one, other = reports((1.0, True), (0.0, False))
    elsewhere = dataclasses.replace(other, data_source="y")
    found = summarize_validation([one, elsewhere], undecided={"y"})
    assert (found.pass_rate, found.score) == (None, 0.5)
    assert [name for name in found.metrics if "/acc/" in name] == ["val-core/x/acc/mean@1"]


def test_a_reward_between_0_and_1_is_remembered_unless_a_function_is_marked() -> None:
    sources = UndecidedSources(RewardConfig())
    sources.observe(0, reports((1.0, True), (None, None)))
    assert sources.names == set()
    sources.observe(1, reports((0.5, None)))
    assert sources.names == {"x"}
    marked = UndecidedSources(RewardConfig(path="r.py", pass_by="compute_score"))
    marked.observe(0, reports((0.5, None)))
    assert marked.names == set()


@pytest.mark.parametrize("undecided", [(), ("x",)])
def test_answers_of_which_none_could_be_scored_say_why(undecided: tuple[str, ...]) -> None:
    found = summarize_validation(reports((None, None), (None, None)), undecided=undecided)
    assert (found.pass_rate, found.mean_reward) == (0.0, None)
    assert found.describe() == "none of 2 answers could be scored, so none counts as passed (the first: no)"


def test_a_validation_is_shown_as_one_line() -> None:
    many = summarize_validation(reports(*[(1.0, True)] * 500))
    assert repr(many) == f"Validation({many.describe()})"
    assert len(repr(many)) < 200


def test_an_evaluation_is_shown_without_its_answers() -> None:
    total = summarize_validation(reports((1.0, True), (0.0, False)))
    found = Evaluation(
        total=total,
        by_source={"x": total, "y": total},
        answers=({"response": "a" * 40_000},),
        seconds=1.25,
        usage={},
    )
    line = total.describe()
    assert repr(found) == f"Evaluation({line}; x: {line}; y: {line}; 1.2 s)"
