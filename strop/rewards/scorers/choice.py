"""Multiple choice: the letter that an answer settles on.

Read, in this order, the last place of the first kind that is there:

    \\boxed{B}   \\boxed{\\text{(B)}}
    <answer>B</answer>
    answer: B   the answer is (B)   correct option is **B**   答案：B
    a line or whole answer that is only the letter: B   (B)   B.   B) some text

A letter inside a sentence is no choice, so neither is the article "A". Only letters that the question offers count,
where extra_info says how many there are. Deviation: some graders in use take the first capital letter
anywhere, which rewards every answer that begins with "A ...".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from strop.rewards.scorers.math_boxed import last_boxed
from strop.rewards.scorers.tags import last_tagged

_LETTERS = "ABCDEFGHIJ"
_WRAPPED = r"[\s*_`$(\[{\"'“]*"
_ONE = rf"{_WRAPPED}(?:\\(?:text|mathrm|mathbf|textbf)\s*\{{\s*\(?)?([A-J])(?![A-Za-z'’])"
_BLANKS = re.compile(r"\s+")
_MAX_LINE = 1000
"""Of a line that may be a choice; what follows says nothing about that."""
_STATED = re.compile(
    rf"(?:answer|option|choice|答案|选项|选)(?:\s+(?:is|was|would\s+be|should\s+be))?\s*(?:[:：=]|是|为)?\s*"
    rf"(?:(?:option|choice)\s*)?{_ONE}",
    re.IGNORECASE,
)
_ALONE = re.compile(
    rf"^{_WRAPPED}(?:option\s+|choice\s+)?([A-J])(?:{_WRAPPED}[)\].:：,、}}*_`$\"'”]+(?:\s.*)?)?$",
    re.IGNORECASE,
)


def extract(solution_str: str, num_choices: int = len(_LETTERS)) -> str | None:
    """The chosen letter, upper case; None where there is none among the first `num_choices`."""
    offered = _LETTERS[:num_choices]
    boxed = last_boxed(solution_str)
    if boxed is not None and (letter := _lone_letter(boxed)) is not None:
        return letter if letter in offered else None
    solution_str = _BLANKS.sub(_one_blank, solution_str)
    tagged = last_tagged(solution_str, ignore_case=True)
    if tagged is not None:
        letter = _lone_letter(tagged.strip()) or _last_capital(_STATED.findall(tagged))
        return letter if letter is not None and letter in offered else None
    letter = _last_capital(_STATED.findall(solution_str))
    if letter is None:
        lines = [line.strip() for line in solution_str.strip().splitlines() if line.strip()]
        letter = next(
            (choice for line in reversed(lines) if (choice := _lone_letter(line)) is not None), None
        )
    return letter if letter is not None and letter in offered else None


def _one_blank(run: re.Match[str]) -> str:
    """One blank, or one end of line, for a run of them: several take the expressions above cubic time."""
    return "\n" if "\n" in run[0] else " "


def _lone_letter(text: str) -> str | None:
    """The letter of a text that holds nothing but a choice."""
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", text.strip())
    if len(text) > _MAX_LINE:
        text = text[:_MAX_LINE] + "x"  # any letter: a line of signs that goes on is no choice
    match = _ALONE.match(text)
    if match is None or (match[1].islower() and len(text) > 3):  # "a) ..." of an enumeration in prose
        return None
    return match[1].upper()


def _last_capital(matches: Sequence[str]) -> str | None:
    """The last capital letter; a small one, as in "the answer is a number", is a word."""
    letters = [letter for letter in matches if letter.isupper()]
    return letters[-1] if letters else None


def grade(
    solution_str: str,
    ground_truth: object,
    *,
    data_source: str = "",
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """1 for the right letter, else 0.

    Args:
        solution_str: the answer.
        ground_truth: the letter, or (an integer) the number of the right choice counted from 0.
        data_source: for error sentences.
        extra_info: may have `choices` (a list, or a dictionary with `text`), which says how many there are.

    Raises:
        ValueError: the ground truth is neither.
    """
    truth = _truth(ground_truth, data_source)
    num_choices = _num_choices(extra_info or {})
    if _LETTERS.index(truth) >= num_choices:
        raise ValueError(f"the right choice is {truth}, but extra_info.choices has only {num_choices}")
    pred = extract(solution_str, num_choices)
    return {"score": float(pred == truth), "acc": pred == truth, "pred": pred or ""}


def _truth(ground_truth: object, data_source: str) -> str:
    if (
        isinstance(ground_truth, int)
        and not isinstance(ground_truth, bool)
        and 0 <= ground_truth < len(_LETTERS)
    ):
        return _LETTERS[ground_truth]
    text = str(ground_truth).strip().strip("().").upper()
    if len(text) == 1 and text in _LETTERS:
        return text
    raise ValueError(
        f"the ground truth of a choice question is a letter from A to {_LETTERS[-1]}, or an integer counted from 0, "
        f"not {ground_truth!r}{f' (data_source {data_source!r})' if data_source else ''}; check "
        f"reward_model.ground_truth"
    )


def _num_choices(extra_info: Mapping[str, Any]) -> int:
    choices = extra_info.get("choices", extra_info.get("options"))
    if isinstance(choices, Mapping) and isinstance(choices.get("text"), Sequence):
        choices = choices["text"]
    if (
        isinstance(choices, (Sequence, Mapping))
        and not isinstance(choices, str)
        and 1 < len(choices) <= len(_LETTERS)
    ):
        return len(choices)
    return len(_LETTERS)


def compute_score(solution_str: str, ground_truth: object) -> float:
    """The score alone, under the name and with the arguments users import."""
    return float(grade(solution_str, ground_truth)["score"])
