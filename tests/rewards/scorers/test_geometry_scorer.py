"""The scorer of hiyouga/geometry3k: boxed answers as mathematics, degrees and units taken off."""

from __future__ import annotations

import pytest

from strop.rewards import default_compute_score, known_data_sources
from strop.rewards.scorers import geometry


@pytest.mark.parametrize(
    ("answer", "truth", "is_right"),
    [
        ("65", "65", True),
        (r"65^\circ", "65", True),
        (r"65^{\circ}", "65", True),
        ("65°", "65", True),
        ("65 degrees", "65", True),
        (r"x = 65", "65", True),
        (r"m\angle ABC = 65", "65", True),
        (r"6\sqrt{3} \text{ cm}", r"6 \sqrt{3}", True),
        (r"\sqrt{108}", r"6 \sqrt{3}", True),
        (r"21 \text{ square units}", "21", True),
        (r"\frac{1}{2}", "0.5", True),
        ("65", "66", False),
        ("5", "65", False),
        (r"60^\circ", "65", False),
        ("", "65", False),
    ],
)
def test_answers_are_compared_without_their_dress(answer: str, truth: str, is_right: bool) -> None:
    graded = default_compute_score("hiyouga/geometry3k", f"so it is $\\boxed{{{answer}}}$.", truth)
    assert (graded["acc"], graded["score"]) == (is_right, float(is_right))


def test_an_answer_without_a_box_is_wrong() -> None:
    assert geometry.grade("the angle is 65", "65") == {"score": 0.0, "acc": False, "pred": ""}
    assert "hiyouga/geometry3k" in known_data_sources()


def test_the_form_has_its_share_of_the_score() -> None:
    # 0.9 for the answer and 0.1 for the form: thinking between its tags, then the box.
    formed, bare = r"<think>sum of angles</think> \boxed{65}", r"\boxed{65}"
    scores = [geometry.compute_score(text, truth, 0.1) for text in (formed, bare) for truth in ("65", "66")]
    assert scores == pytest.approx([1.0, 0.1, 0.9, 0.0])
    with pytest.raises(ValueError, match="format_score is 2; it is the share"):
        geometry.grade(bare, "65", format_score=2)
