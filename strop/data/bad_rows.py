"""Rows that cannot be used, counted and told together: whoever mends a file mends it once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strop.utils.chat_template import TemplateTooCostly

_MOST_REASONS, _MOST_ROWS = 5, 6
"""Of those that a sentence lists."""


class BadRows:
    """Collects the errors of the rows of a split."""

    def __init__(self, split: str, num_rows: int, *, files: str) -> None:
        """Begin with none.

        Args:
            split: word for the rows in messages.
            num_rows: of all.
            files: setting that names their files.
        """
        self._split, self._num_rows, self._files = split, num_rows, files
        self._errors: dict[int, tuple[str, ValueError]] = {}
        """Name of the row in errors, and its error, by its number."""

    @contextlib.contextmanager
    def reading(self, where: str) -> Iterator[None]:
        """A row is read, which errors call `where`, such as `train row 17`; a ValueError about it is kept."""
        try:
            yield
        except TemplateTooCostly:
            raise  # no fault of the row, and the next one would take as long
        except ValueError as error:
            self._errors.setdefault(int(where.rpartition(" ")[2]), (where, error))

    def check(self) -> None:
        """Raise a ValueError about the rows that cannot be used, if there are any."""
        if not self._errors:
            return
        by_reason: dict[str, list[int]] = {}
        errors = sorted(self._errors.items())
        for number, (where, error) in errors:
            reason = str(error).removeprefix(where).lstrip(": ")
            by_reason.setdefault(reason, []).append(number)
        _, (_, first) = errors[0]
        if len(self._errors) == 1:
            raise first
        if len(by_reason) == 1 and len(self._errors) == self._num_rows:
            raise ValueError(f"{first} (so it is in all {self._num_rows} rows)") from first
        reasons = list(by_reason.items())
        lines = [f"{_rows(numbers)}: {reason}" for reason, numbers in reasons[:_MOST_REASONS]]
        if more := sum(len(numbers) for _, numbers in reasons[_MOST_REASONS:]):
            lines.append(f"and {more} more rows")
        listed = "\n  - ".join(lines)
        raise ValueError(
            f"{len(self._errors)} of {self._num_rows} {self._split} rows cannot be used; mend them, or take them out "
            f"of {self._files}:\n  - {listed}"
        ) from first


def null_in(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """`null in 'chosen'` for columns that are there and hold nothing in this row; empty where there is none."""
    empty = [key for key in keys if key in row and is_absent(row[key])]
    word = "NaN" if any(row[key] is not None for key in empty) else "null"
    return f"{word} in {' and '.join(map(repr, empty))}" if empty else ""


def is_absent(value: object) -> bool:
    """True for what stands where a value is missing: null, or the NaN that tables of numbers have in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _rows(numbers: Sequence[int]) -> str:
    more = len(numbers) - _MOST_ROWS
    listed = ", ".join(map(str, numbers[:_MOST_ROWS])) + (f" and {more} more" if more > 0 else "")
    return f"row{'s' * (len(numbers) > 1)} {listed}"
