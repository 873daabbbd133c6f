from __future__ import annotations

import json
import math

import pytest

from strop.rewards import Outcome, RewardError, check_failed_share, summarize
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
        ["done", "score", None, {}, "", 0.1],
        ["done", "score", "1.0", {}, "", 0.1],
        ["done", "score", math.nan, {}, "", 0.1],
        ["done", "score", 1.0, {"a": [1]}, "", 0.1],
        ["done", "score", 1.0, {}, None, 0.1],
        ["done", "score", 1.0, {}, ""],
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
