"""Choice questions and questions for search, on the forms that models write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.rewards import default_compute_score, known_data_sources
from strop.rewards.scorers import choice, search_qa

CHOSEN = {
    "B": "B",
    "(B)": "B",
    "b": "B",
    "B.": "B",
    "B) because it is so": "B",
    "**B**": "B",
    "The answer is B.": "B",
    "The answer is (B).": "B",
    "the correct option is **B**": "B",
    "Answer: B": "B",
    "Final answer: $B$": "B",
    "ANSWER: **(B)** Paris": "B",
    "答案：B": "B",
    "答案是B。": "B",
    r"So \boxed{B}": "B",
    r"\boxed{\text{B}}": "B",
    r"\boxed{(B)}": "B",
    r"\boxed{\text{(B) Paris}}": "B",
    "<answer>B</answer>": "B",
    "<answer> (B) </answer>": "B",
    "<answer>The answer is B</answer>": "B",
    "Answer: A. No, wait. Answer: B": "B",
    "A is too small.\nC is too large.\nB": "B",
    "I think it is A.\n<answer>B</answer>": "B",
    "A good answer needs thought.": None,
    "The answer is a number.": None,
    "Answer: Because": None,
    "A man has a dog": None,
    r"\boxed{42}": None,
    "": None,
}


@pytest.mark.parametrize(("text", "letter"), CHOSEN.items())
def test_letter_of_an_answer(text: str, letter: str | None) -> None:
    assert choice.extract(text) == letter


@given(st.text(max_size=200))
def test_any_text_has_one_letter_or_none(text: str) -> None:
    assert choice.extract(text, 4) in ("A", "B", "C", "D", None)


@pytest.mark.parametrize(
    ("truth", "extra_info", "score"),
    [("B", {}, 1.0), ("(b)", {}, 1.0), (1, {}, 1.0), ("C", {"choices": ["x", "y", "z"]}, 0.0)],
)
def test_choice_is_scored_against_a_letter_or_a_number(
    truth: Any, extra_info: dict[str, Any], score: float
) -> None:
    graded = default_compute_score("cais/mmlu", "Answer: B", truth, extra_info)
    assert graded == {"score": score, "acc": score == 1.0, "pred": "B"}


def test_letter_beyond_the_choices_is_no_answer() -> None:
    choices = {"choices": {"text": ["x", "y"], "label": ["A", "B"]}}
    assert default_compute_score("choice/own", "Answer: D", "B", choices)["pred"] == ""
    with pytest.raises(ValueError, match="the right choice is D, but extra_info.choices has only 2"):
        default_compute_score("choice/own", "Answer: B", "D", choices)


@pytest.mark.parametrize("truth", ["12", "1", "Paris", True, None])
def test_ground_truth_that_is_no_choice_is_named(truth: Any) -> None:
    with pytest.raises(ValueError, match="a letter from A to J, or an integer counted from 0"):
        default_compute_score("Idavidrein/gpqa", "Answer: B", truth)


def test_normalisation_is_that_of_squad() -> None:
    # Lower case; punctuation gone without a blank in its place; articles gone as whole words; blanks joined.
    assert search_qa.normalize("The  U.S.A.'s   an-other, a Theatre!") == "usas another theatre"


def test_search_answer_is_compared_with_every_accepted_one() -> None:
    truth = {"target": ["Barack Obama", "Obama"]}
    text = "<answer>no</answer> <information>Obama</information> <answer> the obama. </answer>"
    graded = default_compute_score("searchR1_nq", text, truth)
    assert graded == {"score": 1.0, "acc": True, "pred": "the obama.", "em": 1.0, "f1": 1.0}
    assert default_compute_score("searchR1_hotpotqa", "Obama", truth)["score"] == 0.0, "not in tags"
    assert (
        default_compute_score("searchR1_popqa", "<answer>Biden</answer>", truth, format_score=0.1)["score"]
        == 0.1
    )


def test_f1_counts_each_word_as_often_as_both_have_it() -> None:
    # answer: x x y (3 words), truth: x y z z (4 words); common: x and y, so F1 = 2 * 2 / (3 + 4).
    graded = search_qa.grade("<answer>x x y</answer>", "x y z z", method="f1")
    assert graded["score"] == pytest.approx(4 / 7)
    assert graded["acc"] is False


def test_substring_match_counts_whole_words() -> None:
    assert search_qa.grade("<answer>it was Paris in 1900</answer>", ["paris"], method="subem")["score"] == 1.0
    assert search_qa.grade("<answer>comparison</answer>", ["paris"], method="subem")["score"] == 0.0
    assert search_qa.grade("<answer>it was Paris in 1900</answer>", ["paris"])["score"] == 0.0


@given(st.text("abthe ", max_size=20), st.text("abthe ", max_size=20))
def test_f1_is_symmetric_and_one_only_for_equal_words(one: str, other: str) -> None:
    left, right = search_qa.normalize(one), search_qa.normalize(other)
    value = search_qa.f1(left, right)
    assert value == search_qa.f1(right, left)
    assert 0.0 <= value <= 1.0
    assert (value == 1.0) == (sorted(left.split()) == sorted(right.split()))


@pytest.mark.parametrize("truth", [None, {"target": []}, {"answers": ["x"]}, []])
def test_search_question_without_an_accepted_answer_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match="an answer, a list of accepted ones"):
        search_qa.grade("<answer>x</answer>", truth)


def test_every_search_data_set_has_its_scorer() -> None:
    assert {f"searchR1_{name}" for name in search_qa.SOURCES} <= set(known_data_sources())


def test_settings_of_the_sandbox_may_be_passed_on_empty_and_are_refused_otherwise() -> None:
    empty: dict[str, Any] = {
        "sandbox_fusion_url": None,
        "concurrent_semaphore": None,
        "memory_limit_mb": None,
    }
    assert default_compute_score("exact", "x", "x", None, **empty)["score"] == 1.0
    with pytest.raises(
        ValueError, match="memory_limit_mb is 512; set reward.sandbox.limits.memory_mib instead"
    ):
        default_compute_score("exact", "x", "x", memory_limit_mb=512)
