"""Verdicts in the replies of a judge, as numbers; a sentence about the reply where there are none.

A reply is untrusted as far as the answers are that the judge read: it may repeat them. What counts stands last, must
have the form that was asked for, and lies within the range of the rubric.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import regex  # type: ignore[import-untyped]

from strop.rewards.judges.config import JudgeConfig
from strop.utils.sanitize import read_json_at, storable_text

_MAX_VERDICT_CHARS = 1 << 16
"""The verdict is looked for in the last so many characters of a reply."""
_MAX_OBJECTS = 200
"""And among the last so many places where an object begins."""
_PATTERN_S = 5.0
_NOTHING: Any = object()
_BEGINNING = re.compile(r'\{\s*["}]')
_LINE_BREAK = re.compile(r"[\t\n\r\f\v]")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
"""A backslash, with what it may stand before in JSON."""
MAX_LISTED = 26
"""Answers that letters can name."""
TIES = ("tie", "draw", "equal")


def verdict(config: JudgeConfig, text: str, tag: str = "") -> tuple[float, str] | str:
    """Score and reason of a reply; a sentence about the reply where there is no score.

    The reason is the field of that name; in a reply without one, what stands before the verdict.

    Args:
        config: says where the score stands.
        text: the reply.
        tag: letters that the verdict must have as its `id`; empty: none.
    """
    text = _conclusion(text)
    if config.pattern:
        try:
            value, start = _last_match(config.pattern, text)
        except TimeoutError:
            return f"gave a reply in which reward.judge.pattern was looked for longer than {_PATTERN_S:g} s"
        if value is _NOTHING:
            return "gave no verdict (nothing matches reward.judge.pattern)"
        reason: Any = text[:start]
    else:
        verdict_object, start = _last_object(text, config.score_field, tag)
        if verdict_object is None:
            return f"gave no verdict (no JSON object with {config.score_field!r})"
        value = verdict_object[config.score_field]
        reason = verdict_object.get("reason", text[:start])
    score = _score(config, value)
    return score if isinstance(score, str) else (score, _text(reason))


def criteria_verdict(config: JudgeConfig, text: str, tag: str = "") -> tuple[dict[str, float], str] | str:
    """The score of each criterion and the reason, in the same way; every criterion must have one."""
    text = _conclusion(text)
    verdict_object, start = _last_object(text, "scores", tag)
    values = None if verdict_object is None else verdict_object["scores"]
    if verdict_object is None or not isinstance(values, Mapping):
        return "gave no verdict (no JSON object with 'scores')"
    scores = {}
    for criterion in config.criteria:
        if criterion.name not in values:
            return f"gave no score for {criterion.name!r}"
        score = _score(config, values[criterion.name])
        if isinstance(score, str):
            return f"{score} (criterion {criterion.name})"
        scores[criterion.name] = score
    return scores, _text(verdict_object.get("reason", text[:start]))


def points(text: str, count: int, tag: str = "") -> list[float] | str:
    """Points of the answers of a comparison, in the order in which they were shown: 1 the best, 0 the worst.

    Of two, from the field `winner`; of more, from the field `ranking`, which names each letter once.
    """
    text = _conclusion(text)
    letters = [letter_of(index) for index in range(count)]
    if count == 2:
        verdict_object, _ = _last_object(text, "winner", tag)
        winner = None if verdict_object is None else verdict_object["winner"]
        word = winner.strip().lower() if isinstance(winner, str) else ""
        if word in TIES:
            return [0.5, 0.5]
        if word not in ("a", "b"):
            return "gave no verdict (no JSON object whose 'winner' is A, B or tie)"
        return [1.0, 0.0] if word == "a" else [0.0, 1.0]
    verdict_object, _ = _last_object(text, "ranking", tag)
    ranking = None if verdict_object is None else verdict_object["ranking"]
    if not isinstance(ranking, list) or len(ranking) != count:
        ranking = []
    names = [name.strip().upper() if isinstance(name, str) else "" for name in ranking]
    if sorted(names) != letters:
        return f"gave no verdict (no JSON object whose 'ranking' has each of {', '.join(letters)} once)"
    return [1 - names.index(letter) / (count - 1) for letter in letters]


def letter_of(index: int) -> str:
    """Name of the answer at an index: A, B, ..."""
    return chr(ord("A") + index)


def _text(reason: object) -> str:
    return reason.strip() if isinstance(reason, str) else ""


def _score(config: JudgeConfig, value: Any) -> float | str:
    """A number of the rubric's range, or a sentence."""
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        return f"gave the score {storable_text(value)[:80]!r}, which is no number"
    if isinstance(value, bool):
        score = config.highest if value else config.lowest
    if not (math.isfinite(score) and config.lowest <= score <= config.highest):
        return f"gave the score {score:g}, outside of {config.lowest:g} to {config.highest:g}"
    return score


def _last_match(pattern: str, text: str) -> tuple[Any, int]:
    """First group of the last place where an expression of the user matches, and that place; _NOTHING without one.

    The lock of the interpreter is not held meanwhile.

    Raises:
        TimeoutError: an expression can take exponential time, and this one took more than _PATTERN_S.
    """
    last, start = _NOTHING, 0
    for match in regex.compile(pattern).finditer(text, timeout=_PATTERN_S, concurrent=True):
        last, start = match.group(1), match.start()
    return last, start


def _last_object(text: str, name: str, tag: str) -> tuple[Mapping[str, Any] | None, int]:
    """The last JSON object in a text that has this field, and this tag, at its top, and where it begins.

    Looked at are the last _MAX_OBJECTS beginnings of one: a judge may repeat what it was given to read, and each
    beginning is read to its end. One that is no JSON for a formula or a line break in its texts is mended.
    """
    mended = _ESCAPE.sub(lambda escape: escape[0] if escape[1] else r"\\", _LINE_BREAK.sub(" ", text))
    starts, mended_starts = (
        [match.start() for match in _BEGINNING.finditer(one)][-_MAX_OBJECTS:] for one in (text, mended)
    )
    for start, mended_start in zip(reversed(starts), reversed(mended_starts), strict=True):
        for one, at in ((text, start), (mended, mended_start)):
            try:
                value, _ = read_json_at(one, at)
            except ValueError:
                continue
            if isinstance(value, dict) and name in value and (not tag or value.get("id") == tag):
                return value, start
            break
    return None, 0


def _conclusion(text: str) -> str:
    """The end of a reply; nothing of one that is still thinking where it ends."""
    is_thinking = text.lstrip().startswith("<think>") and "</think>" not in text
    return "" if is_thinking else text[-_MAX_VERDICT_CHARS:]
