"""Values from outside: JSON that is read, values that are written, numbers that are used."""

from __future__ import annotations

import datetime
import json
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any

from strop.utils.sanitize.text import BROKEN, MAX_CHARS, describe_object, encodable, is_text, storable_text

MAX_JSON_DEPTH = 100
"""Objects and lists within each other in a JSON text that is read."""
MAX_DEPTH = 64
"""The same in a value that is written."""
MAX_ITEMS = 1 << 18
"""Of one value, all levels together."""
MAX_DIGITS = 600
"""Of an integer. Python turns any number of up to 640 digits into text, whatever its limit is set to."""
MAX_NUMBER = 1e15
"""Size of a number that is trained with or averaged: its square still fits 32 bits, also added up over a million."""
_MAX_KEY_CHARS = 1000
_INT64 = 1 << 63
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text from outside, every text in it `encodable`.

    An integer of more than 600 digits becomes a text that says how many it has: no program asked for it as a number.

    Raises:
        ValueError: it is no JSON, or nested more than 100 levels deep.
    """
    try:
        if not isinstance(text, str):
            text = text.decode(json.detect_encoding(text), "surrogatepass")
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is no {error.encoding}") from None
    value, end = read_json_at(text, len(text) - len(text.lstrip(_BLANKS)))
    if len(text.rstrip(_BLANKS)) > end:
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at a place of a text, and where it ends.

    Raises:
        ValueError: as of `read_json`.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[", start, end) + text.count("{", start, end) > MAX_JSON_DEPTH and is_deeper(value):
        raise ValueError(_TOO_DEEP)
    return encodable_value(value), end


def is_deeper(value: object, limit: int = MAX_JSON_DEPTH) -> bool:
    """True if lists and dictionaries are nested more than so many levels deep; no recursion."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        level = [inner for inner in level if isinstance(inner, dict | list)]
        if not level:
            return False
        level = [item for inner in level for item in (inner.values() if isinstance(inner, dict) else inner)]
    return True


def int_of_json(digits: str) -> int | str:
    """An integer in JSON, for `parse_int` of a decoder."""
    return int(digits) if len(digits) <= MAX_DIGITS else _too_long(len(digits.lstrip("-")))


_DECODER = json.JSONDecoder(parse_int=int_of_json)
_BLANKS = " \t\n\r"
_TOO_DEEP = f"objects and lists are nested more than {MAX_JSON_DEPTH} deep"


def _too_long(num_digits: int) -> str:
    return f"[integer of {num_digits} digits]"


def encodable_value(value: object) -> Any:
    """Lists, tuples, dictionaries and texts with every text `encodable`; all else as it is.

    What is sound already is returned itself, not a copy. What is nested more than 100 levels deep becomes a mark.
    """
    return _encodable(value, MAX_JSON_DEPTH)


def _encodable(value: object, depth: int) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if not isinstance(value, (list, tuple, dict)):
        return value
    if not depth:
        return "[nested more deeply]"
    if not isinstance(value, dict):
        items = [_encodable(item, depth - 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return items if isinstance(value, list) else tuple(items)
    entries = {_encodable(key, depth - 1): _encodable(item, depth - 1) for key, item in value.items()}
    same = len(entries) == len(value) and all(
        new is old and entries[new] is item for new, (old, item) in zip(entries, value.items(), strict=True)
    )
    return value if same else entries


def finite(value: object) -> float | None:
    """A number from outside as a finite float; None for what is no number, not finite, or too large for a float."""
    number = real(value)
    return number if number is not None and math.isfinite(number) else None


def real(value: object) -> float | None:
    """A number from outside as a float, infinite where it is too large for one; None for what is no number."""
    try:
        if isinstance(value, numbers.Real):
            try:
                return float(value)
            except OverflowError:
                return math.copysign(math.inf, 1 if value > 0 else -1)  # type: ignore[operator]  # with a number
        if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
            inner = item()  # of a tensor or array without dimensions
            return real(inner) if isinstance(inner, (bool, int, float)) else None
    except BROKEN:
        return None
    return None


def usable(value: object) -> float | None:
    """A number from outside that can be trained with and averaged: finite, at most 1e15 in size; else None."""
    number = real(value)
    return number if number is not None and abs(number) <= MAX_NUMBER else None


def as_number(value: object) -> float:
    """The float that `storable` wrote as a number or as one of its three words; NaN for anything else."""
    number = _NON_FINITE.get(value) if is_text(value) else real(value)
    return math.nan if number is None else number


def storable(
    value: object, *, max_depth: int = MAX_DEPTH, max_items: int = MAX_ITEMS, max_chars: int = MAX_CHARS
) -> Any:
    """Any value as plain JSON that every reader takes: None, bool, int64, finite floats, text, lists and dictionaries.

    Texts and keys are `storable_text`. NaN and infinities become "nan", "inf" and "-inf": JSON has no such numbers.
    Integers beyond 64 bits become their digits as text. Arrays become lists, sets sorted lists; keys become text, and
    of two that become the same the second has a number behind it. Any other object becomes a short description.
    What is left out leaves a mark: "[…]" with what it was.

    Args:
        value: anything.
        max_depth: levels of lists and dictionaries.
        max_items: values in it, all levels together.
        max_chars: of all its texts together.
    """
    return _Walk(max_depth, max_items, max_chars).value(value)


class _Walk:
    """One pass over a value, with what is left of its limits."""

    def __init__(self, max_depth: int, max_items: int, max_chars: int) -> None:
        self._depth, self._items, self._chars = max_depth, max_items, max_chars
        self._above: set[int] = set()

    def value(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return _integer(value)
        if kind is float:
            return value if math.isfinite(value) else str(value)
        if kind is str:
            return self._text(value)
        if kind is list or kind is tuple:
            return self._nested(value, self._list)
        if kind is dict:
            return self._nested(value, self._dict)
        try:
            return self._other(value)
        except BROKEN:  # its own code, which says what it is, failed
            return self._text(describe_object(value))

    def _other(self, value: Any) -> Any:
        match value:
            case str():
                return self._text(value)
            case int():
                return _integer(int.__int__(value))
            case float():
                return self.value(float.__float__(value))
            case Mapping():
                return self._nested(value, self._dict)
            case set() | frozenset():
                return self._nested(value, self._set)
            case datetime.date() | datetime.time():
                return self._text(value.isoformat())
            case PurePath():
                return self._text(str(value))
            case numbers.Integral():
                return _integer(operator.index(value))
            case numbers.Real():
                return self.value(float(value))
            case bytes() | bytearray() | memoryview():
                return self._text(f"[{type(value).__name__} of length {len(value)}: {bytes(value[:40])!r}]")
            case Sequence():
                return self._nested(value, self._list)
        if callable(tolist := getattr(value, "tolist", None)):
            size = getattr(value, "size", 0)
            num_items = (
                size if isinstance(size, int) else math.prod(value.shape)
            )  # a tensor's `size` is a method
            if num_items > self._items:
                return self._text(f"[array of {num_items} numbers]")
            return self.value(tolist())
        return self._text(describe_object(value))

    def _nested(self, value: object, read: Callable[[Any], Any]) -> Any:
        if id(value) in self._above:
            return "[the same value again]"
        if not self._depth:
            return "[nested more deeply]"
        self._above.add(id(value))
        self._depth -= 1
        try:
            return read(value)
        finally:
            self._depth += 1
            self._above.discard(id(value))

    def _text(self, text: str, max_chars: int = MAX_CHARS) -> str:
        result = storable_text(text, max_chars=max(0, min(self._chars, max_chars)))
        self._chars -= len(result)
        return result

    def _list(self, values: Sequence[Any]) -> list[Any]:
        items: list[Any] = []
        for item in islice(values, max(0, self._items)):
            if self._items <= 0:
                break
            self._items -= 1
            items.append(self.value(item))
        if len(items) < len(values):
            items.append(f"[… {len(values) - len(items)} more]")
        return items

    def _set(self, values: Iterable[Any]) -> list[Any]:
        return sorted(
            self._list(list(values)), key=json.dumps
        )  # the order of a set differs between processes

    def _dict(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        times: dict[str, int] = {}
        num_read = 0
        for key, item in values.items():
            if self._items <= 0:
                break
            self._items -= 1
            num_read += 1
            name = base = self._key(key)
            while name in entries:
                times[base] = times.get(base, 1) + 1
                name = f"{base} ({times[base]})"
            entries[name] = self.value(item)
        if num_read < len(values):
            entries["…"] = f"[{len(values) - num_read} more]"
        return entries

    def _key(self, key: object) -> str:
        if is_text(key):
            return self._text(key, _MAX_KEY_CHARS)
        plain = (
            self.value(key) if key is None or isinstance(key, (bool, int, float)) else describe_object(key)
        )
        return self._text(plain if isinstance(plain, str) else json.dumps(plain), _MAX_KEY_CHARS)


def _integer(value: int) -> int | str:
    if -_INT64 <= value < _INT64:
        return value
    num_digits = int(value.bit_length() * math.log10(2)) + 1
    return str(value) if num_digits < MAX_DIGITS else _too_long(num_digits)
