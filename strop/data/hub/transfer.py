"""Files between a folder of this machine and what a URL names, through fsspec.

What tells that a folder is whole goes last, and a folder that is fetched appears when it is whole.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from strop.data.cache import size_of
from strop.data.hub.remote import Refused, Unreachable
from strop.data.hub.stores import get_file, inside, key_of, listing_of, name_below, open_store, translated
from strop.data.hub.waiting import while_heard

SILENCE_S = 600.0
"""How long a store may take nothing, in seconds: some tell of a file when all of it is there."""
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "r2"}
"""Stores whose names have slashes and no folders; making one there could make a bucket."""
LAST = ("config.json", "manifest.json")
"""What tells a reader that the rest is there, so it comes last."""


def check_empty(url: str) -> None:
    """Find out that nothing lies below a URL.

    Raises:
        Refused: something does, or the store refuses.
        Unreachable: it does not answer.
    """
    check_store(url)
    with _understood():
        names = list(_infos(url)[1])
    if names:
        raise Refused(f"{names[0]} lies there already: name an empty folder, or one that does not exist")


def check_store(url: str) -> None:
    """Find out that a store would take something: its client is there, it lets us in, and the bucket exists.

    Raises:
        Refused: it would not; the sentence says what to do.
        Unreachable: it does not answer.
    """
    with _understood():
        system, path = open_store(url.rstrip("/"))
        bucket = path.strip("/").partition("/")[0]
        if not _has_folders(system) and not _has_bucket(system, bucket):
            raise Refused(f"there is no bucket {bucket}: make it first, or check the address")
        with suppress(FileNotFoundError):
            system.ls(path, detail=False)


def _has_bucket(system: Any, bucket: str) -> bool:
    """Whether there is a bucket; where we may not ask for it as a whole, the folder in it may be ours."""
    try:
        with suppress(PermissionError):
            system.info(bucket)
    except FileNotFoundError:
        return False
    return True


def _infos(url: str) -> tuple[bool, dict[str, Mapping[str, Any]]]:
    """Whether a URL names a folder, and what the store says of each file below it, by its path there; none where there
    is no such folder."""
    system, path = open_store(url.rstrip("/"))
    try:
        is_folder, found = listing_of(system, path)
    except FileNotFoundError:
        return True, {}
    return is_folder, {name_below(path, name): info for name, info in found.items()}


@contextmanager
def _understood() -> Iterator[None]:
    """Errors of a store's client as Refused or Unreachable."""
    try:
        yield
    except (Refused, Unreachable, TimeoutError):
        raise
    except Exception as error:
        raise translated(error) from error


def put_folder(folder: Path, url: str, *, say: Callable[[str], object] = lambda line: None) -> dict[str, int]:
    """Send every file of a folder, those that tell that it is whole at the end.

    Args:
        folder: of this machine.
        url: of the folder there, which may exist.
        say: hears how far it is.

    Returns:
        Bytes of each file below the URL, as the store says.

    Raises:
        Refused, Unreachable: it could not be sent.
        TimeoutError: the store takes nothing.
    """
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.name in LAST, path)
    )
    put_files(folder, [path.relative_to(folder).as_posix() for path in files], url, say=say)
    with _understood():
        return {name: int(info["size"] or 0) for name, info in _infos(url)[1].items()}


def put_files(
    folder: Path, names: Sequence[str], url: str, *, say: Callable[[str], object] = lambda line: None
) -> None:
    """Send files of a folder, in this order; errors as of `put_folder`."""
    counting = _Counting()
    with _understood():
        system, root = open_store(url.rstrip("/"))
        for name in names:
            work = partial(_put, system, folder / name, f"{root}/{name}", counting.callback())
            while_heard(work, counting.total, SILENCE_S)
            say(f"sent {name}")


def get_files(url: str, names: Sequence[str], folder: Path) -> None:
    """Fetch files below a URL into a folder of this machine, which is absent and appears when all are there.

    Raises:
        Refused, Unreachable, TimeoutError: they cannot be had.
        ValueError: a name leads out of the folder.
    """
    staging = folder.with_name(f".fetching-{folder.name}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        targets = {name: inside(staging, name) for name in names}
        with _understood():
            system, path = open_store(url.rstrip("/"))
            for name, target in targets.items():
                target.parent.mkdir(parents=True, exist_ok=True)
                work = partial(get_file, system, f"{path}/{name}", target, name=name, stated=None)
                while_heard(work, partial(size_of, staging))
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def state_of(url: str) -> tuple[str, list[str]]:
    """A key that changes with the files below a URL, and their names there; none where there is no such folder.

    Raises:
        Refused, Unreachable: the store does not say.
    """
    with _understood():
        is_folder, infos = _infos(url)
    infos = infos if is_folder else {}
    return key_of(url, infos), sorted(infos)


def remove_folder(url: str) -> None:
    """Remove a folder and what is in it, what tells that it is whole first; nothing where there is none."""
    with _understood():
        system, path = open_store(url.rstrip("/"))
        if system.exists(path):
            for name in LAST:
                if system.exists(f"{path}/{name}"):
                    system.rm_file(f"{path}/{name}")
            system.rm(path, recursive=True)


def _put(system: Any, path: Path, target: str, callback: Any) -> None:
    if _has_folders(system):
        system.makedirs(target.rpartition("/")[0], exist_ok=True)
    system.put_file(str(path), target, callback=callback)


def _has_folders(system: Any) -> bool:
    kinds = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
    return not kinds & _WITHOUT_FOLDERS


class _Counting:
    """Bytes that a store has taken, over several files."""

    def __init__(self) -> None:
        self._callbacks: list[Any] = []

    def callback(self) -> Any:
        """What the client tells of the next file."""
        made: Any = importlib.import_module("fsspec.callbacks").Callback()
        self._callbacks.append(made)
        return made

    def total(self) -> int:
        return sum(int(one.value) for one in self._callbacks)
