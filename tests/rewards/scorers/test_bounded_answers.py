"""Whatever reads an answer, a judge's reply or a program's last words takes time in proportion to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import growth
import pytest

from strop.agents.tools import python_sandbox
from strop.data import prepare
from strop.rewards import worker_process
from strop.rewards.judges import judge, replies
from strop.rewards.judges.config import JudgeConfig
from strop.rewards.scorers import (
    choice,
    countdown,
    exact,
    geometry,
    gsm8k,
    math_boxed,
    math_dapo,
    reasoning_gym,
    search_qa,
    tags,
)

READERS: dict[str, Callable[[str], object]] = {
    "choice": choice.extract,
    "countdown": lambda text: countdown.grade(text, {"target": 1, "numbers": [1]}),
    "exact": lambda text: exact.grade(text, "1"),
    "geometry": geometry._bare,
    "gsm8k": lambda text: (gsm8k.grade(text, "1"), gsm8k.grade(text, "1", "flexible")),
    "math_boxed": math_boxed.last_boxed,
    "math_dapo": lambda text: math_dapo._plain(text[-300:]),
    "reasoning_gym": lambda text: reasoning_gym.is_expression(reasoning_gym.extract(text)),
    "search_qa": lambda text: search_qa.grade(text, ["a b", "the c"], "f1"),
    "tags": lambda text: tags.last_tagged(text, ignore_case=True),
    "judge": lambda text: judge.verdict(JudgeConfig(), text),
    "solutions of data sets": prepare.last_boxed,
    "stack dumps": worker_process._FRAME.findall,
    "fences of the python tool": python_sandbox._without_fence,
}
MARKS = [
    "<answer>", "</answer>", "\\boxed{", "\\text{", "\\boxed", "}", "{", "(", ")", "####", "answer", "answer is ",
    "Answer:", "option ", "A", "选", " ", "\n", "1", ",", "$", "-", "**", "*", '{"score":', '{"', '"', "[", '{"a":1},',
    "\\", "```", "```python\n", '  File "', '", line 1 in ', "the ", "degrees", "^{", "\\{", "if ", "lambda:", "a,",
]  # fmt: skip


def texts_of(name: str) -> list[tuple[str, str, str]]:
    choose = random.Random(name)
    made = [("", mark, "") for mark in MARKS] + [("\\boxed{", mark, "}") for mark in MARKS]
    made += [("<answer>", mark, "x</answer>") for mark in MARKS]
    for _ in range(40):
        parts = ["".join(choose.choices(MARKS, k=choose.randint(low, 3))) for low in (0, 1, 0)]
        made.append((parts[0], parts[1], parts[2]))
    return made


@pytest.mark.parametrize("name", sorted(READERS))
def test_reading_takes_time_in_proportion_to_the_text(name: str) -> None:
    for begin, repeated, end in texts_of(name):
        growth.assert_linear(READERS[name], lambda n, b=begin, r=repeated, e=end: b + r * n + e)  # type: ignore[misc]


def test_a_pattern_that_takes_for_ever_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "_PATTERN_S", 0.2)
    service = {"base_url": "http://127.0.0.1:1/v1", "model": "judge"}
    slow = JudgeConfig(pattern=r"((?:\d|\d\d)+)!", **service)  # type: ignore[arg-type]
    found = judge.verdict(slow, "1" * 60 + "x!")
    assert found == "gave a reply in which reward.judge.pattern was looked for longer than 0.2 s"
    assert judge.verdict(slow, "0 1!") == (1.0, "0"), "what stands before it is its reason"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{a\{b} c", r"a\{b"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1 \boxed{2} 3}", "2"),
        (r"} \boxed {x}", "x"),
        (r"{ \fbox{x}", "x"),
        (r"\boxed{", None),
        ("none", None),
    ],
)
def test_the_last_box_of_a_solution(text: str, found: str | None) -> None:
    assert prepare.last_boxed(text) == found


def test_the_last_verdict_of_a_reply_counts() -> None:
    reply = 'Text {"score": 0.1} {x} \\frac{1}{2} ```json\n{ "reason": "{\\"a\\"}", "score": 0.5 }\n``` {'
    found: Any = judge.verdict(JudgeConfig(), reply)
    assert found[0] == 0.5
