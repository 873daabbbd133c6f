"""Settings of a user's own: strop wrote them for that user on this machine, with exactly these bytes.

strop keeps a hash of every `config.yaml` that it writes, with the directory it was started in, in a private folder of
the user; a run folder can claim anything about itself, so nothing in it counts. Settings without such an entry are
received.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from pathlib import Path

_MAX_ENTRY_BYTES = 1 << 20


def record(config: str) -> bool:
    """Remember settings that were written for this user in this directory; False when the disk refuses.

    Args:
        config: what was written into config.yaml. Not read back: others may write in the folder.
    """
    try:
        folder = _state_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        working_folder = str(Path.cwd())
        if working_folder in made_in(config):
            return True
        descriptor = os.open(folder / _name(config), flags, 0o600)
    except (OSError, RuntimeError):  # no home folder, or none that can be written
        return False
    try:
        os.write(descriptor, (json.dumps(working_folder) + "\n").encode())
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
        status = os.fstat(descriptor)
        if not (stat.S_ISREG(status.st_mode) and _is_private(status)):
            return frozenset()
        lines = file.read(_MAX_ENTRY_BYTES).split(b"\n")[:-1]
    folders = set()
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that a full disk cut counts for nothing
            folders.add(str(json.loads(line)))
    return frozenset(folders)


def _is_private(status: os.stat_result) -> bool:
    """True when it belongs to this user, and nobody else may write it."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _name(config: str) -> str:
    return hashlib.sha256(config.encode()).hexdigest()


def _state_folder() -> Path:
    """`strop/runs` in the user's folder for state.

    Raises:
        RuntimeError: this user has no home folder.
    """
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "strop" / "runs"
