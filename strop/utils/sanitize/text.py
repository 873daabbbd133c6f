"""Text from outside: for use, for a file, for a terminal."""

from __future__ import annotations

import re
import reprlib
import unicodedata
from typing import TypeGuard

from strop.utils.sanitize.secrets import redacted

MAX_CHARS = 1 << 24
"""Of one text that is written: more than any context has, and far below what a column of Parquet can hold."""
MAX_ERROR_CHARS = 2000
"""Of the text of an exception, which may hold a whole answer."""
_MAX_REPR_CHARS = 200

_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_ESCAPED = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t\r"
}
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories of control and format characters (which include changes of direction), lone surrogates,
private use, and the separators of lines and paragraphs."""
_JOINERS = "\u200c\u200d"  # format characters that ordinary words and emoji need
BROKEN = (Exception, SystemExit, GeneratorExit)
"""Errors that the code of a strange object may raise; Ctrl-C is ours."""


def encodable(text: str) -> str:
    """Text to work with: every tokenizer, scorer and request can encode it.

    Half a surrogate pair (JSON can spell one: "\\ud83d") becomes U+FFFD, two halves side by side become their
    character, and known secrets are redacted. Control characters stay: tokenizers and programs read them.
    """
    if not is_text(text):
        return describe_object(text)
    text = str.__str__(text)  # of a subclass, the plain text
    if not text.isascii() and _SURROGATE.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return redacted(text)


def storable_text(text: object, *, max_chars: int = MAX_CHARS) -> str:
    """Text to be written: `encodable`, with control characters other than \\n, \\t and \\r as escapes such as \\x1b.

    Args:
        text: anything; what is no text becomes a short description of itself.
        max_chars: of what follows, only its length is said: "… [12 more characters]".
    """
    result = encodable(text) if is_text(text) else describe_object(text)
    left_out = len(result) - max_chars
    result = result[:max_chars] if left_out > 0 else result
    if _CONTROL.search(result):
        result = result.translate(_ESCAPED)
    return f"{result}… [{left_out} more characters]" if left_out > 0 else result


def printable(text: object, *, is_one_line: bool = False) -> str:
    """Text for a terminal: everything that a terminal would act on is written as an escape such as \\x1b.

    Args:
        text: of any origin.
        is_one_line: also escape line breaks and tabs.
    """
    result = redacted(str.__str__(text)) if is_text(text) else storable_text(text)
    if result.isascii() and result.isprintable():
        return result
    allowed = "" if is_one_line else "\n\t"
    return "".join(char if char in allowed or _is_harmless(char) else _escape(char) for char in result)


def described(error: BaseException, *, max_chars: int = MAX_ERROR_CHARS) -> str:
    """Type and text of an exception: `ValueError: no number`; of a text that cannot be made, that it cannot."""
    name = _name_of(error)
    try:
        text = str(error)
    except BROKEN:
        text = "its text cannot be shown"
    return storable_text(f"{name}: {text}" if text else name, max_chars=max_chars)


def describe_object(value: object) -> str:
    """A short description of any object; without its address, which no two runs share."""
    name = _name_of(value)
    try:
        if isinstance(value, BaseException):
            return described(value)
        if type(value).__repr__ is object.__repr__:
            return f"<{name}>"
        is_known = type(value).__module__ == "builtins"
        text = encodable((_BEGINNINGS.repr if type(value) in _CONTAINERS else repr)(value))
    except BROKEN:  # its own code failed
        return f"<{name}>"
    if not is_known and name not in text[:_MAX_REPR_CHARS]:
        text = f"{name} {text}"
    left_out = len(text) - _MAX_REPR_CHARS
    return text if left_out <= 0 else f"{text[:_MAX_REPR_CHARS]}… [{left_out} more characters]"


class _Beginnings(reprlib.Repr):
    """Of nested lists and dictionaries only the beginnings: all of it may be endless."""

    def repr_instance(self, x: object, level: int) -> str:
        return describe_object(x)


_BEGINNINGS = _Beginnings()
_CONTAINERS = (list, tuple, dict, set, frozenset)


def is_text(value: object) -> TypeGuard[str]:
    """True for strings; an object can lie about its `__class__`, and not about its type."""
    return issubclass(type(value), str)


def _name_of(value: object) -> str:
    name: str = type.__dict__["__name__"].__get__(type(value))
    return encodable(name)[:_MAX_REPR_CHARS]


def _is_harmless(char: str) -> bool:
    return char in _JOINERS or unicodedata.category(char) not in _HIDDEN_CATEGORIES


def _escape(char: str) -> str:
    return char.encode("unicode_escape", errors="backslashreplace").decode("ascii")
