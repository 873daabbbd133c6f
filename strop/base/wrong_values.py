"""The sentence about a value that does not fit its field: what it is, what is needed, and what to write instead.

A value is quoted as it was typed (7e12345, not inf), and the advice is for the place where it stands: a file, or a
command line, where the shell takes quotes away.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from strop.base.field_types import (
    field_hints,
    fits,
    is_mapping,
    is_section,
    literals,
    nearest,
    type_name,
    union_members,
    without_bounds,
)

_TRUE = ("true", "yes", "on", "y", "t", "1", "enable", "enabled")
_FALSE = ("false", "no", "off", "n", "f", "0", "disable", "disabled")
_NONE = ("none", "null", "nil", "~")
_OTHER_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64",
    "double": "float64",
}  # fmt: skip
"""What torch and other libraries call values of ours."""
_NUMBER = re.compile(r"[-+]?(0|[1-9]\d*)(\.\d*)?(e[-+]?\d+)?")
_INFINITY = ("inf", "infinity", ".inf", "+inf", "+.inf")


@dataclass(frozen=True, kw_only=True)
class Written:
    """A plain value as somebody typed it."""

    text: str
    """Without the shell's quotes; those of a file or of an override are part of it."""
    in_shell: bool
    """On a command line, not in a file."""


def mismatch(key: str, hint: Any, value: Any, origin: str = "", written: Written | None = None) -> str:
    """The sentence about a value that does not fit.

    Args:
        key: full key.
        hint: annotation of the field.
        value: that was given.
        origin: ` (in my.yaml, line 3)`, or "".
        written: as it was typed; None: nobody knows, or a program gave it.
    """
    is_plain = isinstance(value, bool | int | float)
    typed = written.text if written is not None and is_plain else _plain(value)
    reasons = [
        one
        for member in union_members(hint)
        for one in getattr(member, "__metadata__", ())
        if isinstance(one, str)
    ]
    needed = ": ".join([_type_name(hint), *reasons])
    advice = _way_out(key, hint, value, typed, written)
    return f"{key} is {typed}{origin}, but it needs {needed}{f'; {advice}' if advice else ''}"


def _type_name(hint: Any) -> str:
    """As `type_name`, where a section names its keys."""
    inner = next((part for part in (hint, *get_args(hint)) if is_section(part)), None)
    if inner is None:
        return type_name(hint)
    return type_name(hint).replace("section", f"a mapping with some of the keys {', '.join(field_hints(inner))}")


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _way_out(key: str, hint: Any, value: Any, typed: str, written: Written | None) -> str:
    """What to write instead, where the value suggests it."""
    kinds = [without_bounds(member) for member in union_members(hint)]
    lists = [kind for kind in kinds if get_origin(kind) is tuple]
    if str in kinds and isinstance(value, bool | int | float):
        return _as_text(key, typed, written)
    if lists and not isinstance(value, list | tuple):
        return _as_list(key, lists[0], value, written)
    if str in kinds and isinstance(value, list | tuple) and len(value) == 1 and fits(hint, value[0]):
        return f"write {value[0]}, without the brackets"
    if isinstance(value, str) and is_section(hint):
        return f"write {_in_section(hint, value, in_file=written is None or not written.in_shell)}"
    if value is None:
        empty = '""' if fits(hint, "") else "{}" if any(map(is_mapping, kinds)) else ""
        return f"for none, write {empty}" if empty else "leave it out for its default"
    if (
        isinstance(value, str)
        and _NUMBER.fullmatch(value)
        and any(fits(hint, one) for one in _numbers(value))
    ):
        return f"write {value} without quotes"
    for other in _meant(hint, value):
        return f"{'for none, ' if other is None else ''}write {_shown(other)}"
    near = _nearest_word(value, [str(word) for word in literals(hint)]) if isinstance(value, str) else None
    return f"did you mean {near}?" if near else ""


def _nearest_word(value: str, words: Sequence[str]) -> str | None:
    """The word of a closed list that somebody means who is used to another library's."""
    word = _OTHER_NAMES.get(value.lower().removeprefix("torch."), value)
    begins = [one for one in words if value.lower().startswith(f"{one}_")]
    return word if word in words else nearest(value, words) or next(iter(begins), None)


def _as_text(key: str, typed: str, written: Written | None) -> str:
    if written is None or not written.in_shell:
        return f'to make it text, put it in quotes: "{typed}"'
    whole = f'"{typed}"' if key.endswith("]") else f'{key}="{typed}"'
    return f"to make it text, put it in quotes, inside those of the shell: '{whole}'"


def _as_list(key: str, hint: Any, value: Any, written: Written | None) -> str:
    """For a value where a list is needed."""
    in_file = written is not None and not written.in_shell
    before = "" if in_file else f"{key}="
    items = get_args(hint)
    if items[-1] is not Ellipsis and (isinstance(value, bool | int | float) or value is None):
        return f"write {before}[{'...' if value is None else _plain(value)},...]"
    if value is None or (isinstance(value, str) and value.lower() in ("", *_NONE)):
        return f"for none, write {before}[]"
    if isinstance(value, str) and value.strip().startswith("[") and value.strip().endswith("]"):
        return f"without the quotes around it, it is a list: {before}{value.strip()}"
    if isinstance(value, str) and "," in value:
        parts = [part.strip() for part in value.split(",") if part.strip()]
        return f"for a list, write {before}[{', '.join(parts) if in_file else ','.join(parts)}]"
    entry = value if isinstance(value, str) else _plain(value)
    if is_section(items[0]) and isinstance(value, str):
        entry = _in_section(items[0], value, in_file=in_file)
    return f"for a list of one, write {before}[{entry}]"


def _in_section(section: type, value: str, *, in_file: bool) -> str:
    """A value as the first key of a section, such as {path:reward.py}."""
    return f"{{{next(iter(field_hints(section)))}:{' ' if in_file else ''}{value}}}"


def _meant(hint: Any, value: Any) -> Iterator[Any]:
    """Values of the right type that this one may stand for."""
    guesses: list[Any]
    if isinstance(value, str):
        word = value.strip().lower()
        guesses = [True] if word in _TRUE else [False] if word in _FALSE else []
        guesses += [None] if word in _NONE else [math.inf] if word in _INFINITY else []
        guesses += list(_numbers(word))
    elif isinstance(value, bool):
        guesses = [int(value)]
    elif isinstance(value, int | float):
        is_whole = isinstance(value, float) and math.isfinite(value) and value.is_integer()
        guesses = [int(value)] if is_whole else []
        guesses += [bool(value)] if value in (0, 1) else []
        guesses += [None] if value <= 0 else []
    else:
        return
    for guess in guesses:
        if fits(hint, guess):
            yield guess


def _numbers(text: str) -> Iterator[int | float]:
    """The number that a text stands for: 010 and 1_000 too, as whole where it is."""
    try:
        number = float(text)
    except ValueError:
        return
    if not math.isfinite(number):
        return
    if number.is_integer():
        yield int(number)
    yield number


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return ".inf" if math.isinf(value) else f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return _plain(value)
