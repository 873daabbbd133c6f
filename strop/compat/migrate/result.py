"""Outcomes of the migration of a setting, and the facts that decide them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["translated", "not there", "not needed", "refused", "unresolved", "unknown"]

ACCOUNTED: frozenset[Status] = frozenset({"translated", "not there", "not needed", "refused"})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of the migration of one setting."""

    status: Status
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Our full keys and their plain values."""
    note: str = ""
    """Reason, or a remark about it."""


class Facts:
    """All settings of the files, over the other library's own defaults."""

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any], unread: Collection[str] = ()
    ) -> None:
        self._given, self._defaults, self._unread = values, defaults, unread

    def is_given(self, key: str) -> bool:
        """The files set the key, whether or not its value could be read."""
        return key in self._given or key in self._unread

    def is_unread(self, key: str) -> bool:
        """The files set the key to a value that could not be read."""
        return key in self._unread

    def get(self, key: str) -> Any:
        """The value in force; None where neither the files nor the defaults have one.

        Raises:
            UnreadableError: the files set it, to a value that could not be read, so the default does not hold.
        """
        if key in self._unread and key in self._defaults:
            raise UnreadableError(f"depends on {key}, which could not be read")
        value = self._given.get(key)
        return self._defaults.get(key) if value is None else value

    def number(self, key: str) -> int | float:
        """The value in force, as a number.

        Raises:
            UnreadableError: it is no number.
        """
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnreadableError(f"{key} is {value!r} and would have to be a number")
        return value

    def whole(self, key: str) -> int:
        """The value in force, as a whole number.

        Raises:
            UnreadableError: it is none.
        """
        return integer(self.get(key))


class UnreadableError(ValueError):
    """Error of a value that a rule cannot read; the message has the reason."""


Rule = Callable[[str, Any, Facts], Outcome]
"""(their key, its value, all facts) -> its outcome."""


def many(ours: Mapping[str, Any], note: str = "") -> Outcome:
    """Several of our keys, or none but a note."""
    return Outcome(status="translated", ours=ours, note=note)


def skip(reason: str) -> Outcome:
    """The outcome of a setting that has nothing to set here."""
    return Outcome(status="not needed", note=reason)


def lack(reason: str) -> Outcome:
    """The outcome of a setting whose matter is not here yet, and the run goes without."""
    return Outcome(status="not there", note=reason)


def refuse(reason: str) -> Outcome:
    """The outcome of a setting that asks for what strop does not do."""
    return Outcome(status="refused", note=reason)


def number(value: object) -> int | float:
    """The value, a number.

    Raises:
        UnreadableError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableError(f"{value!r} would have to be a number")
    return value


def integer(value: object) -> int:
    """The value as a whole number; 1e3 and 3.0 are whole.

    Raises:
        UnreadableError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise UnreadableError(f"{value!r} would have to be a whole number")
    return int(value)
