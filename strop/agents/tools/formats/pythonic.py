"""Calls as a Python list, `[name(key=value, ...), ...]`, read without Python's own parser.

That parser takes minutes over brackets within brackets, and its position of a call takes a pass over
the whole text for each. Here the text is divided into tokens once, each bracket is matched with its end once, and
values are read by a small parser of literals.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from strop.agents.tools.parsed_output import FunctionCall, MalformedCall
from strop.utils.sanitize.values import MAX_JSON_DEPTH

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\f\r\n]+|\#[^\n]*|\\\n)
    |(?P<text>[rRbBuU]{0,2}(?:'''(?:[^'\\]|\\.|'(?!''))*'''|\"\"\"(?:[^"\\]|\\.|"(?!""))*\"\"\"
        |'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"))
    |(?P<number>(?:\d|\.\d)(?:[\w.]|(?<=[eE])[+-])*)
    |(?P<name>[^\W\d]\w*)
    |(?P<sign>.)""",
    re.VERBOSE | re.DOTALL,
)
_PAIRS = {"[": "]", "(": ")", "{": "}"}
_CONSTANTS = {"True": True, "False": False, "None": None}
_NO_LIST = "Tool calls must be a list of calls name(key=value)."


class _NotPlain(ValueError):
    """The tokens are no plain value."""


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


def calls_in_list(body: str) -> list[FunctionCall | MalformedCall]:
    """The calls of a text that begins and ends as a list of calls does; one malformed call where it is none."""
    try:
        list_of_calls = _Tokens(body)
    except _NotPlain as error:
        return [MalformedCall(body, f"Tool calls are not valid Python: {error}")]
    if not list_of_calls.is_one_bracket:
        return [MalformedCall(body, _NO_LIST)]
    entries = list_of_calls.parts_of(0)
    if any(start == stop for start, stop in entries[:-1]):
        return [MalformedCall(body, "Tool calls are not valid Python: nothing stands before a comma")]
    return [list_of_calls.call(start, stop) for start, stop in entries if start < stop]


class _Tokens:
    """A text in tokens, with the end of every bracket."""

    def __init__(self, text: str) -> None:
        """Raises:
        _NotPlain: a bracket has no partner, or a text no end.
        """
        self._text = text
        self._tokens: list[_Token] = []
        self._ends: dict[int, int] = {}
        opened: list[int] = []
        for match in _TOKEN.finditer(text):
            token = _Token(str(match.lastgroup), match[0], match.start(), match.end())
            if token.kind == "blank":
                continue
            index = len(self._tokens)
            self._tokens.append(token)
            if (
                token.kind == "sign" and token.text in "'\"\\"
            ):  # at once: what follows would be looked through again
                raise _NotPlain(f"{token.text} at character {token.start} has no end")
            if self._is(index, "[({"):
                opened.append(index)
            elif self._is(index, "])}"):
                if not opened or _PAIRS[self._tokens[opened[-1]].text] != token.text:
                    raise _NotPlain(f"{token.text} at character {token.start} closes nothing")
                self._ends[opened.pop()] = index
        if opened:
            token = self._tokens[opened[-1]]
            raise _NotPlain(f"{token.text} at character {token.start} was never closed")

    def _is(self, index: int, signs: str) -> bool:
        token = self._tokens[index]
        return token.kind == "sign" and token.text in signs

    @property
    def is_one_bracket(self) -> bool:
        """The whole text is a list."""
        return bool(self._tokens) and self._is(0, "[") and self._ends[0] == len(self._tokens) - 1

    def parts_of(self, opening: int) -> list[tuple[int, int]]:
        """Spans of the parts that commas divide within a bracket; the last one may be empty."""
        parts, index, start = [], opening + 1, opening + 1
        while index < self._ends[opening]:
            if self._is(index, ","):
                parts.append((start, index))
                start = index + 1
            index = self._ends.get(index, index) + 1
        return [*parts, (start, self._ends[opening])]

    def call(self, start: int, stop: int) -> FunctionCall | MalformedCall:
        """The call that is made of these tokens."""
        written = self._text[self._tokens[start].start : self._tokens[stop - 1].end]
        opening = start
        while opening < stop and self._tokens[opening].kind == ("sign" if (opening - start) % 2 else "name"):
            if (opening - start) % 2 and not self._is(opening, "."):
                break
            opening += 1
        if not (opening < stop and (opening - start) % 2 and self._ends.get(opening) == stop - 1):
            return MalformedCall(written, "Each entry of the list must be a call name(key=value).")
        name = "".join(token.text for token in self._tokens[start:opening])
        if not self._is(opening, "("):
            return MalformedCall(written, "Each entry of the list must be a call name(key=value).")
        values: dict[str, Any] = {}
        parts = self.parts_of(opening)
        for number, (first, end) in enumerate(parts):
            if first == end and number == len(parts) - 1:
                break
            if end - first < 2 or self._tokens[first].kind != "name" or not self._is(first + 1, "="):
                return MalformedCall(written, "Give every argument by its name: name(key=value).", name)
            if end - first == 2:
                return MalformedCall(written, "Tool calls are not valid Python: a value is missing.", name)
            try:
                values[self._tokens[first].text] = self.value(first + 2, end, 0)
            except ValueError:
                return MalformedCall(written, "Arguments must be plain values.", name)
        try:
            return FunctionCall(name, json.dumps(values, ensure_ascii=False))
        except (TypeError, ValueError):  # bytes, sets, or keys that JSON has not
            return MalformedCall(written, "Arguments must be plain values.", name)

    def value(self, start: int, stop: int, depth: int) -> Any:
        """The literal that is made of these tokens.

        Raises:
            ValueError: they are none, or nested more than MAX_JSON_DEPTH deep.
        """
        if start >= stop or depth > MAX_JSON_DEPTH:
            raise _NotPlain("no plain value")
        token = self._tokens[start]
        if self._ends.get(start) == stop - 1:
            return self._bracket(start, depth)
        if token.kind == "text":  # several in a row are one
            if any(text_token.kind != "text" for text_token in self._tokens[start:stop]):
                raise _NotPlain("no plain value")
            return _join([_text(text_token.text) for text_token in self._tokens[start:stop]])
        if token.kind == "sign" and token.text in "+-" and start + 2 == stop:
            number = self._tokens[start + 1]
            if number.kind == "number":
                return _number(number.text) if token.text == "+" else -_number(number.text)
        if start + 1 == stop and token.kind == "number":
            return _number(token.text)
        if start + 1 == stop and token.kind == "name" and token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        raise _NotPlain("no plain value")

    def _bracket(self, start: int, depth: int) -> Any:
        """A list, a tuple, a dictionary, or a value in brackets."""
        parts = self.parts_of(start)
        has_comma = len(parts) > 1
        if parts[-1][0] == parts[-1][1]:
            parts.pop()
        if self._is(start, "{"):
            return {self._hashable(*pair[0], depth): self.value(*pair[1], depth + 1)
                    for pair in map(self._pair, parts)}  # fmt: skip
        values = [self.value(first, end, depth + 1) for first, end in parts]
        return values[0] if self._is(start, "(") and len(values) == 1 and not has_comma else values

    def _pair(self, part: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Spans of key and value of an entry of a dictionary."""
        index, stop = part
        while index < stop and not self._is(index, ":"):
            index = self._ends.get(index, index) + 1
        return (part[0], index), (index + 1, stop)

    def _hashable(self, start: int, stop: int, depth: int) -> Any:
        key = self.value(start, stop, depth + 1)
        if not isinstance(key, str | int | float | None):
            raise _NotPlain("a key that JSON has not")
        return key


def _text(written: str) -> Any:
    """The value of one text in quotes.

    Raises:
        ValueError: it is none.
    """
    if "\\" not in written and written[0] in "'\"" and written[:3] not in ("'''", '"""'):
        return written[1:-1]
    try:
        return ast.literal_eval(written)  # a single token: nothing in it is nested
    except (SyntaxError, MemoryError) as error:
        raise _NotPlain(str(error)) from None


def _number(written: str) -> int | float:
    """The value of one number.

    Raises:
        ValueError: it is none, or too long.
    """
    try:
        return int(written, 0)
    except ValueError:
        if written.replace("_", "").isdecimal():  # of too many digits, or with a zero before them
            raise
        return float(written)


def _join(values: list[Any]) -> Any:
    try:
        return values[0][:0].join(values)
    except TypeError:
        raise _NotPlain("text and bytes in one value") from None
