"""Isolation of a private cluster: the folder of its files, the place of its object store, the file of its token, and
its signals."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ray._private import ray_constants, utils
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token

from strop.utils.sanitize import remember_secret

log = logging.getLogger(__name__)

_SHORT = Path("/tmp")
"""Folder of a cluster's files if the usual folder for temporary files has a long name."""
_MAX_FOLDER_LENGTH = 36
"""Names of Unix sockets have at most 107 characters, and Ray puts up to 70 behind this."""
_PREFIX = "strop-ray-"
_LOCK = "lock"
_STORE_BYTES = 2**30
"""Object store of a private cluster: address space, which holds memory only where it is used."""
_STORE_SHARE = 0.3
"""Largest share of the free shared memory, or of the free disk where that has no room."""
_FILES_BYTES = 8 * 2**20
"""Disk for logs and sockets, below which Ray's servers do not come up, and do not say why."""
_SHARED_MEMORY = "/dev/shm"
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Ray's handlers, which end the program with a dump of C++ frames, do not stay; the ones before come back.

    SIGTERM and SIGHUP wait for the end of the block, so that a cluster is either there, with its reaper, or not.
    What Ray starts meanwhile gets a session of its own: a signal for this process and all its group (a terminal that
    closes, `timeout`, Slurm) is for this process alone, which then ends the cluster in order.
    """
    if threading.current_thread() is not threading.main_thread():  # the only one that may set handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in _HANDLED}
    came: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: came.append(number))
    share_fate, set_handler = utils.set_kill_on_parent_death_linux, utils.set_sigterm_handler

    def leave_session() -> None:  # in the new process, before its program
        share_fate()  # type: ignore[no-untyped-call]
        os.setsid()

    utils.set_kill_on_parent_death_linux = leave_session
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_kill_on_parent_death_linux, utils.set_sigterm_handler = share_fate, set_handler
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for late in came:
            signal.raise_signal(late)


class PrivateFolder:
    """A folder of mode 0700 for the files of one cluster, locked while this process lives."""

    def __init__(self) -> None:
        """Make it, and remove those of processes that were killed together with their reaper."""
        usual = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
        base = usual if len(str(usual)) + len(f"/{_PREFIX}12345678") <= _MAX_FOLDER_LENGTH else _SHORT
        base.mkdir(parents=True, exist_ok=True)  # RAY_TMPDIR need not be there yet, as for Ray itself
        _remove_stale(base)
        self.path, self._lock = _make_locked_folder(base)

    def remove(self) -> None:
        """Remove it with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _make_locked_folder(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / _LOCK).exists():  # else taken for a stale one between the two lines above
            return path, lock
        os.close(lock)


def _remove_stale(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, in use, gone already, or so young that it has no lock yet
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def store_options(folder: Path) -> dict[str, Any]:
    """Size of a private cluster's object store, and the folder for it where shared memory has no room for the least one
    that Ray starts.

    Args:
        folder: of the cluster's files.

    Raises:
        ConnectionError: the disk has no room for these files, or for the store.
    """
    on_disk = _free_bytes(folder)
    if on_disk < _FILES_BYTES:
        raise _no_room(folder, on_disk, "the files of a Ray cluster")
    if not Path(_SHARED_MEMORY).is_dir():
        return {"object_store_memory": _STORE_BYTES}
    size = int(_free_bytes(_SHARED_MEMORY) * _STORE_SHARE)
    if size >= ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES:
        return {"object_store_memory": min(_STORE_BYTES, size)}
    size = min(_STORE_BYTES, int(on_disk * _STORE_SHARE))
    if size < ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES:
        raise _no_room(folder, on_disk, f"Ray's object store, and {_SHARED_MEMORY} is too small for it")
    log.warning(
        "%s is too small for Ray's object store, which is on the disk below %s instead, and slower; a container gets "
        "more with --shm-size=1g",
        _SHARED_MEMORY,
        folder,
    )
    return {"object_store_memory": size, "_plasma_directory": str(folder)}


def _no_room(folder: Path, free: int, needed_for: str) -> ConnectionError:
    return ConnectionError(
        f"could not start a Ray cluster: {folder.parent} has {free / 2**20:.0f} MiB free for {needed_for}; make room "
        f"there, or name another folder in RAY_TMPDIR"
    )


def _free_bytes(folder: str | Path) -> int:
    usable = os.statvfs(folder)
    return usable.f_bavail * usable.f_frsize


def remember_token() -> None:
    """Keep the token of this user's clusters out of every record that this process writes."""
    remember_secret(os.environ.get("RAY_AUTH_TOKEN", ""))
    with suppress(OSError):  # without the file there is no token to keep
        remember_secret(_token_file().read_text(encoding="ascii", errors="replace"))


def _token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def keep_token_private() -> None:
    """The file with the token of this user's clusters is for this user alone; made here, because Ray's is for all."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    file = _token_file()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            _write_token(file)
        status = file.stat()
        if status.st_mode & 0o077 and status.st_uid == os.getuid():
            file.chmod(0o600)  # Ray itself makes it with 0644
            if all(folder.stat().st_mode & 0o001 for folder in file.resolve().parents):
                log.warning(
                    "other users of this machine could read %s, the key of your Ray clusters; now they cannot. Remove "
                    "it when none of them runs, and the next run makes another one",
                    file,
                )
    except OSError as error:
        # A home that nobody can write into: a token for what this process starts.
        log.info("a token of its own for this run, because %s is out of reach (%s)", file, error)
        os.environ["RAY_AUTH_TOKEN"] = _new_token()


_new_token: Any = generate_new_authentication_token


def _write_token(file: Path) -> None:
    handle, name = tempfile.mkstemp(prefix="auth_token-", dir=file.parent)  # of mode 0600
    try:
        with os.fdopen(handle, "w", encoding="ascii") as part:
            part.write(_new_token())
        with suppress(FileExistsError):  # another process was first
            os.link(name, file)
    finally:
        Path(name).unlink()
