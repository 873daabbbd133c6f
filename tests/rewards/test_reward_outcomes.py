from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from strop.rewards import Outcome, RewardError, check_failed_share, summarize
from strop.rewards.outcome import causes, remedies
from strop.rewards.wire import outcome_of
from strop.utils.json_lines import decode, encode

OK = Outcome(kind="score", score=1.0)
SLOW = Outcome(kind="timeout", error="compute_score did not finish in 10 s")
CRASH = Outcome(kind="error", error="ZeroDivisionError: division by zero at my_reward.py:41")


def test_summary_counts_each_kind_and_names_the_most_frequent_error() -> None:
    assert summarize([OK, OK], timeout_s=10.0) == "reward: 2 ok"
    assert summarize([OK, SLOW, SLOW, CRASH], timeout_s=10.0) == (
        "reward: 1 ok, 2 timeout (>10 s), 1 error (ZeroDivisionError: division by zero at my_reward.py:41)"
    )
    other = Outcome(kind="error", error="KeyError: 'x' at my_reward.py:3")
    assert summarize([CRASH, other, CRASH], timeout_s=0.5) == (
        "reward: 0 ok, 3 error (2 times ZeroDivisionError: division by zero at my_reward.py:41; 1 other error)"
    )


def test_an_exception_of_one_line_is_one_kind_whatever_value_it_repeats() -> None:
    def failed(text: str) -> Outcome:
        return Outcome(kind="error", error=f"compute_score in r.py raised {text}")

    literals = [
        failed(f"ValueError: invalid literal for int() with base 10: 'x{n}' at r.py:4") for n in range(5)
    ]
    assert summarize([OK, *literals], timeout_s=1.0) == (
        "reward: 1 ok, 5 error (compute_score in r.py raised ValueError: invalid literal for int() with base 10: 'x0' "
        "at r.py:4, and alike with other values)"
    )
    mixed = [*literals, failed("KeyError: 'a' at r.py:4"), failed("ValueError: 'x' at r.py:9")]
    assert summarize(mixed, timeout_s=1.0) == (
        "reward: 0 ok, 7 error (5 times compute_score in r.py raised ValueError: invalid literal for int() with base "
        "10: 'x0' at r.py:4, and alike with other values; 2 other errors)"
    )


def test_share_of_failures_above_the_limit_stops_the_run() -> None:
    check_failed_share([OK] * 4 + [SLOW], max_failed_share=0.2, timeout_s=10.0)
    check_failed_share([], max_failed_share=0.2, timeout_s=10.0)
    with pytest.raises(RewardError, match=r"2 of 5 samples could not be scored.*3 ok, 1 timeout \(>10 s\)"):
        check_failed_share([OK] * 3 + [SLOW, CRASH], max_failed_share=0.2, timeout_s=10.0)


JUDGE = "reward.judge.base_url=http://127.0.0.1:9/v1"
DOWN = Outcome(kind="infrastructure", error="the judge refused with HTTP status 503", service=JUDGE)


@pytest.mark.parametrize(
    ("outcome", "named", "not_named"),
    [
        (CRASH, "mend it", "start"),
        (SLOW, "raise reward.timeout_s", "mend it"),
        (
            Outcome(kind="infrastructure", error="x could not score: OSError"),
            "runs and is reached",
            "mend it",
        ),
        (DOWN, "http://127.0.0.1:9/v1 must run, and take these requests from here; or set", "mend it"),
        (DOWN, "set reward.judge.base_url", "reward.timeout_s"),
        (
            Outcome(kind="timeout", error="the judge did not answer in 60 s", service=JUDGE),
            "raise reward.judge.timeout_s",
            "reward.timeout_s",
        ),
        (
            Outcome(kind="error", error="the judge m gave no verdict", service=JUDGE),
            "http://127.0.0.1:9/v1 answers, and at the settings in reward.judge",
            "mend it",
        ),
    ],
)
def test_advice_is_about_what_failed(outcome: Outcome, named: str, not_named: str) -> None:
    advice = remedies([OK, outcome], repair="mend it")
    assert named in advice
    assert not_named not in advice


def test_each_cause_gets_its_advice_once_and_the_most_frequent_comes_first() -> None:
    (down, advice), *others = causes([CRASH, DOWN, OK, DOWN, SLOW], repair="mend it")
    assert down == DOWN.error
    assert "http://127.0.0.1:9/v1 must run" in advice
    faster = "make the function faster, or raise reward.timeout_s"
    assert others == [(CRASH.error, "mend it"), (SLOW.error, faster)]
    assert remedies([CRASH, SLOW], repair="mend it") == f"{CRASH.error}: mend it; {SLOW.error}: {faster}"
    assert causes([OK], repair="mend it") == []
    assert remedies([OK], repair="mend it") == ""


def test_the_most_frequent_error_of_a_cause_is_shown() -> None:
    rare = Outcome(kind="error", error="f in r.py raised KeyError: 'a' at r.py:4")
    often = [Outcome(kind="error", error=f"f in r.py raised ValueError: {n} at r.py:9") for n in (1, 2, 2)]
    assert causes([rare, *often], repair="mend it") == [(often[1].error, "mend it")]


def test_an_outcome_with_a_remedy_of_its_own_gets_no_other() -> None:
    spent = replace(DOWN, error="the judge was not asked: raise reward.judge.max_cost", remedy="")
    agent = replace(CRASH, error="the agent gave no score", remedy="mend the agent")
    assert remedies([spent], repair="mend it") == "do what the error says"
    assert remedies([agent], repair="mend it") == "mend the agent"
    assert remedies([spent, agent, spent], repair="mend it") == (
        "the judge was not asked: raise reward.judge.max_cost; the agent gave no score: mend the agent"
    )
    assert summarize([replace(SLOW, remedy="use another recording")], timeout_s=3.0) == (
        "reward: 0 ok, 1 timeout (compute_score did not finish in 10 s)"
    )


def test_a_run_that_stops_for_a_judge_that_is_down_does_not_blame_the_function() -> None:
    with pytest.raises(RewardError, match="http://127.0.0.1:9/v1 must run") as caught:
        check_failed_share([DOWN] * 3, max_failed_share=0.2, timeout_s=10.0)
    assert "repair" not in str(caught.value)


def test_a_judge_that_is_too_slow_is_not_said_to_have_the_limit_of_a_function() -> None:
    slow = Outcome(kind="timeout", error="the judge did not answer in 60 s", service=JUDGE)
    assert summarize([slow, SLOW], timeout_s=10.0) == (
        "reward: 0 ok, 1 timeout (>10 s), 1 timeout (the judge did not answer in 60 s)"
    )


@pytest.mark.parametrize(
    ("kind", "score", "error"),
    [
        ("score", None, ""),
        ("score", math.nan, ""),
        ("score", 1.0, "x"),
        ("error", 0.0, "x"),
        ("timeout", None, ""),
    ],
)
def test_outcome_is_a_score_or_a_reason(kind: str, score: float | None, error: str) -> None:
    with pytest.raises(ValueError, match="needs"):
        Outcome(kind=kind, score=score, error=error)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        ["done", "score", None, {}, [], "", 0.1],
        ["done", "score", "1.0", {}, [], "", 0.1],
        ["done", "score", math.nan, {}, [], "", 0.1],
        ["done", "score", 1.0, {"a": [1]}, [], "", 0.1],
        ["done", "score", 1.0, {}, [], None, 0.1],
        ["done", "score", 1.0, {}, [], ""],
        ["done", "score", 1.0, {}, [[-1, 1.0]], "", 0.1],
        ["done", "score", 1.0, {}, [[0, math.nan]], "", 0.1],
        ["done", "score", 1.0, {}, [[0.5, 1.0]], "", 0.1],
        ["done", "score", 1.0, {}, [0], "", 0.1],
        ["start"],
    ],
)
def test_result_of_another_form_is_refused(message: list[object]) -> None:
    with pytest.raises(ValueError, match="not the result of a reward worker"):
        outcome_of(json.loads(json.dumps(message)))


def test_messages_survive_the_pipe() -> None:
    message = [7, {"text": "a\nb\u2028\ud800", "raw": b"\x00\xff", "sizes": (1, 2), "nested": [{"raw": b""}]}]
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    message[1]["sizes"] = [1, 2]  # type: ignore[index]
    assert decode(line[:-1]) == message
