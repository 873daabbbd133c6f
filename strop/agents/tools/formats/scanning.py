"""Looking for marks in a text that a model wrote, in time that grows with its length and no faster.

An expression such as `<open>(.*?)<close>` looks for the end of each beginning anew: a text of openings without an end
takes quadratic time, two of them in a row cubic. The readers of the formats look for one mark after the other instead,
from places that only move forward.
"""

from __future__ import annotations

import re


class Marks:
    """Positions of marks in one text. Searches may jump back; the time is linear while they move forward."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: dict[str, tuple[int, int]] = {}
        """By mark: start and result of the last search."""
        self._matches: dict[re.Pattern[str], tuple[int, re.Match[str] | None]] = {}

    def find(self, mark: str, start: int) -> int:
        """Position of the next `mark` from `start` on; -1 where there is none. A search is never repeated."""
        searched_from, position = self._found.get(mark, (0, -2))
        if position == -2 or start < searched_from or 0 <= position < start:
            position = self.text.find(mark, start)
            self._found[mark] = (start, position)
        return position

    def search(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """The next match of an expression from `start` on. A search is never repeated."""
        searched_from, match = self._matches.get(pattern, (-1, None))
        if searched_from < 0 or start < searched_from or (match is not None and match.start() < start):
            match = pattern.search(self.text, start)
            self._matches[pattern] = (start, match)
        return match

    def skip_blanks(self, start: int) -> int:
        """The first position from `start` on that is no white space."""
        while start < len(self.text) and self.text[start].isspace():
            start += 1
        return start


def without_end(text: str, mark: str) -> str:
    """The text without a `mark` that ends it, white space behind the mark included; as it is where none does."""
    closed = text.rstrip()
    return closed.removesuffix(mark) if closed.endswith(mark) else text
