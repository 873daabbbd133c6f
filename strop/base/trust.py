"""Whether what settings name may be run: the one door in front of code, commands and addresses.

The settings of a run are a user's own when strop wrote exactly these bytes for that user on this machine. strop keeps
a hash of every `config.yaml` that it writes, with the directory it was started in, in a private folder of the user; a
run folder can claim anything about itself, so nothing in it counts. Settings without such an entry are received:
what they name is not run, imported, started or contacted unless the user says so for this command.

Every place that does one of these asks `ask` first. The door stands open unless a command closes it, so a program that
uses strop as a library, and the worker processes of a run that was let through, are not concerned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

_MAX_ENTRY_BYTES = 1 << 20


class UntrustedCode(ValueError):
    """Something that received settings name would have been run; the message says what, and how to allow it."""


@dataclass(frozen=True, kw_only=True)
class Named:
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
    """Where the settings come from."""
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
    """Whether what this setting names may be run; for those that can do without. `*.name` is every such setting."""
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


# ----------------------------------------------------------------------------------------- what is a user's own


def record(config: str) -> bool:
    """Remember settings that were written for this user in this directory; False when the disk refuses.

    Args:
        config: what was written into config.yaml. Not read back: others may write in the folder.
    """
    try:
        folder = _state_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        here = str(Path.cwd())
        if here in made_in(config):
            return True
        descriptor = os.open(folder / _name(config), flags, 0o600)
    except (OSError, RuntimeError):  # no home folder, or none that can be written
        return False
    try:
        os.write(descriptor, (json.dumps(here) + "\n").encode())
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def made_in(config: str) -> frozenset[str]:
    """The directories in which strop wrote these settings for this user; empty when it never did."""
    try:
        folder = _state_folder()
        if not _is_private(folder.lstat()):
            return frozenset()
        descriptor = os.open(
            folder / _name(config), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except (OSError, RuntimeError):
        return frozenset()
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not (stat.S_ISREG(found.st_mode) and _is_private(found)):
            return frozenset()
        lines = file.read(_MAX_ENTRY_BYTES).split(b"\n")[:-1]
    folders = set()
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that a full disk cut counts for nothing
            folders.add(str(json.loads(line)))
    return frozenset(folders)


def _is_private(found: os.stat_result) -> bool:
    """Of this user, and nobody else may write it."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _name(config: str) -> str:
    return hashlib.sha256(config.encode()).hexdigest()


def _state_folder() -> Path:
    """`strop/runs` in the user's folder for state.

    Raises:
        RuntimeError: this user has no home folder.
    """
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "strop" / "runs"
