"""Trust in settings: the one check in front of code, commands and addresses that settings name.

What received settings name is not run, imported, started or contacted unless the user says so for this command
(which settings are received, strop.trainer.untrusted_runs knows).

Every place that does one of these asks `ask` first. The door stands open unless a command closes it, so a program that
uses strop as a library, and the worker processes of a run that was let through, are not concerned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase


class UntrustedCode(ValueError):
    """Something that received settings name would have been run; the message says what, and how to allow it."""


@dataclass(frozen=True, kw_only=True)
class CodeReference:
    """One thing that a setting names."""

    key: str
    """Full key of the setting."""
    value: str
    """As it stands there, with what becomes of it."""
    path: str = ""
    """The file, where it is one."""


@dataclass(frozen=True)
class _Closed:
    origin: str
    """Source of the settings."""
    own: frozenset[str]
    """Full keys that the user has given on this command line, whose values are the user's."""


_closed: _Closed | None = None


@contextlib.contextmanager
def door() -> Iterator[None]:
    """The time of one command: whatever it closes is open again afterwards."""
    global _closed
    before, _closed = _closed, None
    try:
        yield
    finally:
        _closed = before


def close(origin: str, *, own: Collection[str] = ()) -> None:
    """From here on nothing that settings name is run, except what these full keys name.

    Args:
        origin: what the settings are called, for the sentence of a refusal.
        own: full keys whose values do not come from there.
    """
    global _closed
    _closed = _Closed(origin, frozenset(own))


def reopen() -> None:
    """The settings turned out to be the user's own."""
    global _closed
    _closed = None


def may_run(setting: str) -> bool:
    """True if the code that this setting names may be run; for callers that can do without. `*.name` is every such
    setting."""
    return _closed is None or any(fnmatchcase(own, setting.partition(":")[0]) for own in _closed.own)


def ask(setting: str, named: str) -> None:
    """Pass the door, or raise.

    Args:
        setting: full key of the setting, or its beginning with a colon and a place in the file that it names.
        named: what would be run, imported, started or contacted.

    Raises:
        UntrustedCode: the settings are received, and nobody has allowed it.
    """
    if not may_run(setting):
        assert _closed is not None, "an open door refuses nothing"
        raise UntrustedCode(refusal(_closed.origin, [f"{setting} {named}"]))


def refusal(origin: str, named: Collection[str]) -> str:
    """The sentence of a refusal."""
    return (
        f"{origin} was not written by strop for you on this machine, or was changed since, and this would run what it "
        f"names: {'; '.join(named)}. Look at that first; --trust-code allows it"
    )
