"""Answers written to hang, crash or fool a grader: each is wrong in bounded time, its neighbours keep their scores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from reward_cases import make_prompt, write_reward

from strop.rewards import Outcome, RewardConfig, RewardPool, default_compute_score
from strop.rewards.scorers import budget
from strop.rewards.scorers.tags import last_tagged

pytestmark = pytest.mark.timeout(280)
TIMEOUT_S = 60.0
"""On the clock: comparisons have seconds of computing, which a busy machine gives out slowly."""
TOO_MUCH = "not graded: the comparison took too much computing"

TOO_LONG = {
    "sum of 20000 ones": "1+" * 20000 + "1",
    "100000 digits": "9" * 100_000,
    "5000 fractions": r"\frac{" * 5000 + "1" + "}{2}" * 5000,
    "5000 brackets": "(" * 5000 + "1" + ")" * 5000,
    "500 rows": r"\begin{pmatrix}" + r"1 & 2 \\ " * 500 + r"\end{pmatrix}",
}
ENDLESS = {
    "tower": "10^{10^{10}}",
    "tower of nines": "9^{9^{9^{9}}}",
    "tower below": "10^{-10^{10}}",
    "factorial": "100000000!",
    "factorials": "((20000!)!)!",
    "binomial": r"\binom{10000000}{5000000}",
    "polynomial": "(x+1)^{100000}",
    "series": r"\sum_{n=1}^{10000000000} \frac{1}{n^n}",
    "product": r"\prod_{n=1}^{1000000} n",
    "remainder": r"10^{10^9} \mod 7",
    "logarithm": r"\log_{10}(10^{10^{10}})",
    "gamma": r"\Gamma(10^{10})",
}
WRONG = {
    "bars": "|" * 1900,  # a fast machine reads them within the budget
    "nothing": "",
    "open": "{" * 5000,
    "two answers": "71, 72",
    "or": r"71 \text{ or } 72",
    "or the other way": r"72 \text{ or } 71",
    "set": r"\{71, 72\}",
    "interval": "[0, 100]",
    "inequality": "x < 100",
    "sign": r"\pm 72",
    "true": "1=1",
    "not a number": "nan",
    "infinity": r"\infty",
    "anything": "x",
    "with a constant": "72 + C",
    "negated": r"\text{not } 72",
    "nearly": "72.0000001",
    "nearly below": "71.99999999999999999",
    "wide digits": "\uff17\uff12",
    "raised digit": "7\u00b2",
    "division by zero": r"\frac{1}{0}",
    "1e1000000000": "1e1000000000",
    "roots": r"\sqrt{2+" * 20 + "2" + "}" * 20,
    "code": "__import__('os').abort()",
    "nulls": "\x0072\x00",
    "list": ",".join(map(str, range(1, 100))),
}


def score_texts(
    cases: Mapping[str, tuple[str, str, Any]], config: RewardConfig | None = None
) -> dict[str, Outcome]:
    """Outcomes by name of (data source, answer, ground truth)."""

    async def run() -> list[Outcome]:
        async with RewardPool(config or RewardConfig(timeout_s=TIMEOUT_S)) as pool:
            asked = (
                pool.score_text(make_prompt(data_source=source, ground_truth=truth), text)
                for source, text, truth in cases.values()
            )
            return list(await asyncio.gather(*asked))

    return dict(zip(cases, asyncio.run(run()), strict=True))


def check(payloads: Mapping[str, str], note: str, neighbours: int = 6) -> None:
    cases = {name: ("lighteval/MATH", rf"so \boxed{{{text}}}", "72") for name, text in payloads.items()}
    right = {f"right {number}": ("lighteval/MATH", r"so \boxed{72.0}", "72") for number in range(neighbours)}
    outcomes = score_texts({**cases, **right})
    for name in payloads:
        assert (outcomes[name].kind, outcomes[name].score) == ("score", 0.0), (name, outcomes[name])
        assert note in str(outcomes[name].parts.get("note", "")), (name, outcomes[name].parts)
    for name in right:
        assert (outcomes[name].score, outcomes[name].parts.get("note")) == (1.0, None), name


@pytest.mark.slow
def test_answers_that_say_nothing_or_several_things_are_wrong() -> None:
    check(WRONG, note="")


@pytest.mark.slow
def test_answers_that_are_too_long_are_wrong_and_say_so() -> None:
    check(TOO_LONG, note="characters; at most 2000 are compared")


@pytest.mark.slow
def test_a_tower_of_powers_is_wrong_and_its_neighbours_are_right() -> None:
    check({"tower": ENDLESS["tower"]}, note=TOO_MUCH)


@pytest.mark.slow
def test_answers_that_cannot_be_worked_out_are_wrong() -> None:
    check(ENDLESS, note=TOO_MUCH)


def test_a_long_answer_that_is_the_ground_truth_is_right() -> None:
    truth = "1+" * 3000 + "1"
    graded = default_compute_score("lighteval/MATH", rf"\boxed{{{truth.replace('+', ' + ')}}}", truth)
    assert graded["score"] == 1.0


@pytest.mark.parametrize(
    ("source", "wrong"), [("math_dapo", -1.0), ("hiyouga/geometry3k", 0.0), ("reasoning_gym/countdown", 0.01)]
)
def test_every_grader_that_works_answers_out_has_the_budget(
    monkeypatch: pytest.MonkeyPatch, source: str, wrong: float
) -> None:
    class Spent:
        def comparison(self) -> Any:
            raise budget.OutOfBudget

    monkeypatch.setattr(budget, "_guard", Spent())
    if source.startswith("reasoning_gym"):
        gym = pytest.importorskip("reasoning_gym")
        entry = gym.create_dataset("countdown", seed=3, size=1)[0]
        graded = default_compute_score(source, "1 + 1", "", {"reasoning_gym": json.dumps(entry)})
        wrong = 0.0
    else:
        graded = default_compute_score(source, r"Answer: \boxed{72.0}", "72")
    assert (graded["score"], graded["acc"], graded["note"]) == (wrong, False, TOO_MUCH)


@pytest.mark.slow
def test_a_grader_that_hangs_in_c_or_overflows_the_stack_is_done_again_without_that_comparison(
    tmp_path: Path,
) -> None:
    path = write_reward(
        tmp_path,
        """
        import ctypes
        from strop.rewards.budget import bounded

        def hang():
            return sum(range(10 ** 13)) > 0  # never looks at signals

        def compute_score(solution_str, **_):
            faults = {"hang": hang, "crash": lambda: ctypes.string_at(8)}
            first, why = bounded(faults.get(solution_str, lambda: True), False)
            second, _ = bounded(lambda: True, False)
            return {"score": float(bool(first)) + 10 * second, "why": why}
        """,
    )
    cases = {name: ("x", name, "") for name in ("hang", "crash", "fine", "good")}
    outcomes = score_texts(cases, RewardConfig(path=path, timeout_s=TIMEOUT_S))
    assert {name: outcome.score for name, outcome in outcomes.items()} == {
        "hang": 10.0, "crash": 10.0, "fine": 11.0, "good": 11.0,
    }  # fmt: skip
    assert outcomes["hang"].parts["why"] == outcomes["crash"].parts["why"] == TOO_MUCH


def test_a_library_that_catches_everything_has_no_say_after_its_budget(tmp_path: Path) -> None:
    path = write_reward(
        tmp_path,
        """
        from strop.rewards.budget import bounded

        def caught():
            try:
                while True:
                    pass
            except BaseException:
                return True

        def compute_score(solution_str, **_):
            is_right, why = bounded(caught if solution_str == "caught" else lambda: True, False)
            return {"score": float(is_right), "why": why}
        """,
    )
    cases = {name: ("x", name, "") for name in ("caught", "good")}
    outcomes = score_texts(cases, RewardConfig(path=path, timeout_s=8.0))
    assert {name: (outcome.score, outcome.parts["why"]) for name, outcome in outcomes.items()} == {
        "caught": (0.0, TOO_MUCH), "good": (1.0, ""),
    }  # fmt: skip


def test_a_hang_outside_of_a_comparison_is_a_timeout_and_a_crash_an_error(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    path = write_reward(
        tmp_path,
        f"""
        import ctypes, time
        from strop.rewards.budget import bounded

        def compute_score(solution_str, **_):
            bounded(lambda: True, False)
            if solution_str == "hang":
                time.sleep(1e6)
            open({str(calls)!r}, "a").write("called ")
            return ctypes.string_at(8)
        """,
    )
    cases = {name: ("x", name, "") for name in ("hang", "crash")}
    outcomes = score_texts(cases, RewardConfig(path=path, timeout_s=1.0))
    assert {name: outcome.kind for name, outcome in outcomes.items()} == {"hang": "timeout", "crash": "error"}
    assert calls.read_text() == "called ", "what crashed by itself is not done again"


def test_a_sample_whose_comparisons_all_crash_ends_as_an_error(tmp_path: Path) -> None:
    path = write_reward(
        tmp_path,
        """
        import ctypes
        from strop.rewards.budget import bounded

        def compute_score(solution_str, **_):
            for _ in range(10):
                bounded(lambda: ctypes.string_at(8), 0)
            return 1.0
        """,
    )
    (outcome,) = score_texts({"a": ("x", "", "")}, RewardConfig(path=path, num_workers=1)).values()
    assert (outcome.kind, outcome.score) == ("error", None)
    assert "SIGSEGV" in outcome.error


def test_a_process_whose_comparison_was_interrupted_is_replaced(tmp_path: Path) -> None:
    path = write_reward(
        tmp_path,
        """
        import os
        from strop.rewards.budget import bounded

        def spin():
            while True:
                pass

        def compute_score(solution_str, **_):
            if solution_str == "spin":
                bounded(spin, False)
            return {"score": 1.0, "pid": str(os.getpid())}
        """,
    )

    async def run() -> list[Outcome]:
        async with RewardPool(RewardConfig(path=path, num_workers=1, timeout_s=4.0)) as pool:
            return [await pool.score_text(make_prompt(), text) for text in ("a", "spin", "b", "c")]

    first, spun, second, third = (outcome.parts["pid"] for outcome in asyncio.run(run()))
    assert first == spun
    assert spun != second
    assert second == third


RESPONSES: Sequence[tuple[str, str, Any]] = [
    ("lighteval/MATH", r"\boxed{" * 40_000, "72"),
    ("lighteval/MATH", r"\boxed{72" + "{" * 200_000, "72"),
    ("hiyouga/geometry3k", r"<think></think>\boxed{" * 20_000, "72"),
    ("hiyouga/geometry3k", r"\boxed{" + " " * 1900 + "x}", "72"),
    ("countdown", "<answer>" * 40_000, {"target": 3, "numbers": [1, 2]}),
    ("searchR1_nq", "<answer>" * 40_000, ["a"]),
    ("choice/x", "<ANSWER>" * 40_000, "B"),
    ("choice/x", "answer" + " " * 100_000 + "?", "B"),
    ("choice/x", "B" + "*" * 100_000 + "x", "B"),
    ("openai/gsm8k", "#### " + "1," * 100_000, "72"),
    ("math_dapo", "Answer: " * 40_000, "72"),
    ("exact/x", "7" * 300_000, "72"),
]


@pytest.mark.parametrize(("source", "text", "truth"), RESPONSES, ids=range(len(RESPONSES)))
def test_long_responses_are_read_in_one_pass(source: str, text: str, truth: Any) -> None:
    """A reader that begins anew at each place would need minutes, and end at the deadline of the test."""
    assert default_compute_score(source, text, truth)["score"] <= 0.0


def test_tags_are_paired_from_the_left() -> None:
    # After a pair is closed the search goes on behind it, as in the usual expression <answer>(.*?)</answer>.
    assert last_tagged("<answer>a<answer>b</answer>c</answer>") == "a<answer>b"
    assert last_tagged("<answer>a</answer><answer>b</answer><answer>c") == "b"
    assert last_tagged("</answer><answer>") is None
    assert last_tagged("<ANSWER>a</Answer>") is None
    assert last_tagged("<ANSWER>a</Answer>", ignore_case=True) == "a"
