"""The sentence about a value that does not fit its field: what it is, what is needed, and what to write instead.

A value is quoted as it was typed (7e12345, not inf), and the advice is for the place where it stands: a file or a
program, or a command line, where the shell takes quotes away.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from strop.utils.field_types import (
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
from strop.utils.shell_words import shell_word

_TRUE = ("true", "yes", "on", "y", "t", "1", "enable", "enabled")
_FALSE = ("false", "no", "off", "n", "f", "0", "disable", "disabled")
_NONE = ("none", "null", "nil", "~")
_OTHER_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64",
    "double": "float64",
}  # fmt: skip
"""Names that torch and other libraries use for values of ours."""
_NUMBER = re.compile(r"[-+]?(0|[1-9]\d*)(\.\d*)?(e[-+]?\d+)?")
_INFINITY = ("inf", "infinity", ".inf", "+inf", "+.inf")
_PLAIN_TEXT = re.compile(r"[A-Za-z_./][\w./@-]*", re.ASCII)
"""Text that is taken as such without quotes, in YAML and in an override, where it is no word for another value."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A plain value as somebody typed it."""

    text: str
    """Without the shell's quotes; those of a file or of an override are part of it."""
    in_shell: bool
    """On a command line, not in a file or in a program."""


def text_in_list(text: str) -> str:
    """A text as an entry of a list or mapping in an override, in quotes where it needs them."""
    word = text.lower()
    is_other = word in (*_TRUE, *_FALSE, *_NONE, *_INFINITY, "nan", ".nan") or any(_numbers(word))
    if _PLAIN_TEXT.fullmatch(text) and not is_other:
        return text
    if '"' not in text and "\\" not in text:
        return f'"{text}"'
    # Backslashes are doubled where they stand before a quote, the last one included.
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def mismatch(key: str, hint: object, value: object, origin: str = "", written: Written | None = None) -> str:
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
        reason
        for member in union_members(hint)
        for reason in getattr(member, "__metadata__", ())
        if isinstance(reason, str)
    ]
    needed = ": ".join([_type_name(hint), *reasons])
    advice = _suggestion(key, hint, value, typed, written)
    return f"{key} is {typed}{origin}, but it needs {needed}{f'; {advice}' if advice else ''}"


def _type_name(hint: object) -> str:
    """As `type_name`, where a section names its keys."""
    inner = next((part for part in (hint, *get_args(hint)) if is_section(part)), None)
    if inner is None:
        return type_name(hint)
    return type_name(hint).replace(
        "section", f"a mapping with some of the keys {', '.join(field_hints(inner))}"
    )


def _plain(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _suggestion(key: str, hint: object, value: object, typed: str, written: Written | None) -> str:
    """Advice on a value to write instead, where the wrong one suggests it."""
    kinds = [without_bounds(member) for member in union_members(hint)]
    lists = [kind for kind in kinds if get_origin(kind) is tuple]
    if str in kinds and isinstance(value, bool | int | float):
        return _as_text(key, typed, written)
    if lists and not isinstance(value, list | tuple):
        return _as_list(key, lists[0], value, written)
    if str in kinds and isinstance(value, list | tuple) and len(value) == 1 and fits(hint, value[0]):
        entry = _entry(hint, value[0], written)
        return f"write {entry if entry == value[0] else _assigned(key, entry, written)}, without the brackets"
    if isinstance(value, str) and is_section(hint):
        return f"write {_entry(hint, value, written)}"
    if value is None:
        empty = '""' if fits(hint, "") else "{}" if any(map(is_mapping, kinds)) else ""
        return f"for none, write {empty}" if empty else "leave it out for its default"
    if (
        isinstance(value, str)
        and _NUMBER.fullmatch(value)
        and any(fits(hint, number) for number in _numbers(value))
    ):
        return f"write {value} without quotes"
    for other in _meant(hint, value):
        return f"{'for none, ' if other is None else ''}write {_shown(other)}"
    near = _nearest_word(value, [str(word) for word in literals(hint)]) if isinstance(value, str) else None
    return f"did you mean {near}?" if near else ""


def _nearest_word(value: str, words: Sequence[str]) -> str | None:
    """The word of a closed list that somebody means who is used to another library's."""
    word = _OTHER_NAMES.get(value.lower().removeprefix("torch."), value)
    begins = [choice for choice in words if value.lower().startswith(f"{choice}_")]
    return word if word in words else nearest(value, words) or next(iter(begins), None)


def _as_text(key: str, typed: str, written: Written | None) -> str:
    quoted = f'"{typed}"'
    inside = ", inside those of the shell" if written is not None and written.in_shell else ""
    whole = f"'{quoted}'" if inside and "[" in key else _assigned(key, quoted, written)
    return f"to make it text, put it in quotes{inside}: {whole}"


def _as_list(key: str, hint: object, value: object, written: Written | None) -> str:
    """For a value where a list is needed."""
    items, none = get_args(hint), _assigned(key, "[]", written)
    if items[-1] is not Ellipsis and (isinstance(value, bool | int | float) or value is None):
        begin = "..." if value is None else _plain(value)
        return f"write {_assigned(key, f'[{begin},...]', written)}"
    if value is None or (isinstance(value, str) and value.lower() in ("", *_NONE)):
        return f"for none, write {none}"
    listed, advice = [value], "for a list of one, write "
    if isinstance(value, str) and value.strip().startswith("[") and value.strip().endswith("]"):
        inner, advice = value.strip()[1:-1], "without the quotes around it, it is a list: "
        if re.search(r"[\[\]{}]", inner):
            return f"{advice}{_assigned(key, value.strip(), written)}"
        listed = [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]
    elif isinstance(value, str) and "," in value:
        listed, advice = [part.strip() for part in value.split(",") if part.strip()], "for a list, write "
    in_shell = written is not None and written.in_shell
    entries = ("," if in_shell else ", ").join(_entry(items[0], entry, written) for entry in listed)
    return f"{advice}{_assigned(key, f'[{entries}]', written)}"


def _assigned(key: str, value: str, written: Written | None) -> str:
    """Assignment of a value to a key: with its name on a command line, in quotes where the shell wants them. One entry
    of a list has no key of its own."""
    if written is None or not written.in_shell or "[" in key:
        return value
    return shell_word(f"{key}={value}")


def _entry(hint: object, value: object, written: Written | None) -> str:
    """A value in a list: text in quotes where it needs them, or as the first key of a section, as in {path:reward.py}.
    What a file takes is also that of a program."""
    in_shell = written is not None and written.in_shell
    if not isinstance(value, str):
        return _plain(value)
    if is_section(hint):
        name, inner = next(iter(field_hints(hint).items()))
        entry = _entry(inner, value, written)
        return f"{{{name}:{entry}}}" if in_shell else f'{{"{name}": {entry}}}'
    is_text = any(without_bounds(member) is str for member in union_members(hint)) or any(literals(hint))
    if not is_text:
        return value
    return text_in_list(value) if in_shell else json.dumps(value, ensure_ascii=False)


def _meant(hint: object, value: object) -> Iterator[Any]:
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


def _shown(value: object) -> str:
    if isinstance(value, float):
        return ".inf" if math.isinf(value) else f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return _plain(value)
