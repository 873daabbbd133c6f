"""What reaches the terminal. Results go to standard output, all else to standard error.

Text of models and of reward functions is untrusted: control characters could move the cursor, recolour or
rewrite lines, so they are shown as escapes.
"""

from __future__ import annotations

import json
import signal
import sys
import unicodedata
from collections.abc import Mapping

from strop.run.jsonable import jsonable

_SHOWN_AS_THEY_ARE = "\n\t"
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories of control and format characters (which include changes of direction), lone surrogates,
private use, and the separators of lines and paragraphs."""
_JOINERS = "\u200c\u200d"  # format characters that ordinary words and emoji need


class UsageError(ValueError):
    """The command line itself cannot be used."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or a signal that asks to end, with a sentence about how to go on."""

    def __init__(self, text: str, *, cause: KeyboardInterrupt) -> None:
        super().__init__(text)
        self.number: int = getattr(cause, "number", signal.SIGINT)
        """The signal."""


def plain(text: str, *, is_one_line: bool = False) -> str:
    """The text with everything a terminal would act on written as escapes such as \\x1b.

    Args:
        text: of any origin.
        is_one_line: also escape line breaks and tabs.
    """
    kept = "" if is_one_line else _SHOWN_AS_THEY_ARE
    return "".join(char if char in kept or _is_harmless(char) else _escape(char) for char in text)


def shorten(text: str, length: int) -> str:
    """At most `length` characters of the text, as one line."""
    shown = plain(text, is_one_line=True)
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def say(line: str) -> None:
    """A line for the person who watches."""
    print(plain(line), file=sys.stderr, flush=True)


def print_json(record: Mapping[str, object]) -> None:
    """One JSON object on one line of standard output; NaN and infinities as strings."""
    print(json.dumps(jsonable(record, "result"), ensure_ascii=True), flush=True)


def _is_harmless(char: str) -> bool:
    return char in _JOINERS or unicodedata.category(char) not in _HIDDEN_CATEGORIES


def _escape(char: str) -> str:
    return char.encode("unicode_escape", errors="backslashreplace").decode("ascii")
