"""Terminal output. Results go to standard output, all else to standard error.

Text of models and of reward functions is untrusted: control characters could move the cursor, recolour or
rewrite lines, so they are shown as escapes.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from strop.utils.sanitize import printable, storable


class UsageError(ValueError):
    """The command line itself cannot be used."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or a signal that asks to end, with a sentence about how to go on."""

    def __init__(self, text: str, *, cause: KeyboardInterrupt) -> None:
        super().__init__(text)
        self.number: int = getattr(cause, "number", signal.SIGINT)
        """The signal."""


plain = printable
"""The text with everything a terminal would act on written as escapes such as \\x1b."""


def shorten(text: str, length: int) -> str:
    """At most `length` characters of the text, as one line."""
    line = plain(text, is_one_line=True)
    return line if len(line) <= length else line[: length - 1] + "…"


def number_text(number: float | None) -> str:
    """Four digits of a number; a dash where there is none."""
    return "-" if number is None else f"{number:.4g}"


def rate_text(rate: float, low: float | None, high: float | None) -> str:
    """A share in percent, with its interval where there is one."""
    interval = "" if low is None or high is None else f" ({100 * low:.1f} to {100 * high:.1f})"
    return f"{100 * rate:.1f} %{interval}"


def print_plain(text: str = "", *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print a result; whatever is part of it, no terminal acts on it."""
    print(plain(text), end=end, file=file or sys.stdout)


def say(line: str) -> None:
    """A line for the person who watches."""
    print(plain(line), file=sys.stderr, flush=True)


def check_writable(file: Path) -> None:
    """Make the folder and the file of --out, before time is spent on what goes into it.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise UsageError(f"cannot write --out {file}: {error.strerror}; choose another file") from error


def print_json(record: Mapping[str, object]) -> None:
    """One JSON object on one line of standard output; NaN and infinities as strings."""
    print(json.dumps(storable(record), ensure_ascii=True), flush=True)
