"""Files below a URL, through fsspec: object stores, HDFS, web servers, this machine.

Files that tell that a folder is whole go last, and a folder that is fetched whole appears at once.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from strop.utils.hub.repo import (
    SILENCE_S,
    Listing,
    Refused,
    Repo,
    Sending,
    Unreachable,
    run_with_stall_limit,
    size_of,
)
from strop.utils.hub.store_errors import convert_error, is_of_disk, is_refusal, root_error

_IDENTITY = ("size", "etag", "checksum", "md5", "md5hash", "contentmd5", "crc32c", "digest", "generation", "version",
             "versionid", "mtime", "lastmodified", "modificationtime", "updated", "created", "modified")  # fmt: skip
"""Properties that tell the contents of a file, in lower case without dashes; each store has some of them."""
_CACHE = Path("~/.cache/strop/models")
_TAKING_S = 600.0
"""Time for which a store may take nothing, in seconds: some tell of a file when all of it is there."""
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "r2"}
"""Stores whose names have slashes and no folders; making one there could make a bucket."""
_LAST = ("config.json", "manifest.json")
"""Files that tell a reader that the rest is there, so they come last."""


def open_store(url: str) -> tuple[Any, str]:
    """The file system of fsspec that a URL needs, and the path in it."""
    fsspec: Any = importlib.import_module("fsspec.core")
    logging.getLogger("gcsfs").setLevel(logging.ERROR)  # it warns at every call without credentials
    system, path = fsspec.url_to_fs(url)
    system.invalidate_cache()  # what it saw earlier in this process
    return system, path


def listing_of(system: Any, path: str) -> tuple[bool, Mapping[str, Mapping[str, Any]]]:
    """(The path is a folder, properties of the files there by their names).

    A web server has pages alone: one of HTML that links to files below it is a folder.
    """
    info: Mapping[str, Any] = system.info(path)
    if info["type"] == "directory":
        return True, system.find(path, detail=True)
    linked = system.find(path, maxdepth=2) if info.get("mimetype") == "text/html" else []
    if linked:
        return True, {name: system.info(name) for name in linked}
    return False, {path: info}


def name_below(path: str, name: str) -> str:
    """Name of a file in a copy: its path below the folder, or the last part of its own name."""
    name, path = name.lstrip("/"), path.lstrip("/")  # some stores begin names of one kind alone with it
    if name == path:
        # A web address may end in ?query.
        return PurePosixPath(urlsplit(name).path if "://" in name else name).name
    return PurePosixPath(name.removeprefix(path).lstrip("/")).as_posix()


def key_of(url: str, infos: Mapping[str, Mapping[str, Any]]) -> str:
    """A name for the contents of these files at a URL: another one when the store says that they changed."""
    state = hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=12)
    for local, info in sorted(infos.items()):
        properties = {re.sub("[-_]", "", str(key)).lower(): value for key, value in info.items()}
        state.update(
            repr((local, [(key, str(properties[key])) for key in _IDENTITY if key in properties])).encode()
        )
    return state.hexdigest()


def state_of(url: str) -> tuple[str, list[str]]:
    """A key that changes with the files below a URL, and their names there; none where there is no such folder.

    Raises:
        Refused, Unreachable: the store does not say.
    """
    infos = _infos(url)
    return key_of(url, infos), sorted(infos)


def get_folder(
    system: object,
    files: Mapping[str, str],
    folder: Path,
    *,
    sizes: Mapping[str, int | None] | None = None,
    silence_s: float = SILENCE_S,
) -> None:
    """Fetch files into a folder that appears when all are there; nothing where another process was first.

    Args:
        system: of fsspec.
        files: path in the store by name in the folder.
        folder: of this machine, which is absent.
        sizes: bytes of the files by their names in the folder, where the store states them.
        silence_s: longest time without data from the store, in seconds.

    Raises:
        ValueError: a name leads out of the folder.
        TimeoutError: the store went silent.
        Exception: of the store's client.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix="fetching-", dir=folder.parent))
    try:
        for name, path in files.items():
            get = partial(_get, system, path, staging, name, (sizes or {}).get(name))
            run_with_stall_limit(get, partial(size_of, staging), silence_s)
        try:
            staging.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def get_files(url: str, names: Sequence[str], folder: Path) -> None:
    """Fetch files below a URL as `get_folder` does.

    Raises:
        Refused, Unreachable, TimeoutError: they cannot be had.
    """
    with converted_errors():
        system, path = open_store(url.rstrip("/"))
        get_folder(system, {name: f"{path}/{name}" for name in names}, folder)


def check_store(url: str) -> None:
    """Check that a store would accept files: its client is there, it lets us in, and the bucket exists.

    Raises:
        Refused: it would not; the sentence says what to do.
        Unreachable: it does not answer.
    """
    with converted_errors():
        system, path = open_store(url.rstrip("/"))
        bucket = path.strip("/").partition("/")[0]
        if not has_folders(system) and not _has_bucket(system, bucket):
            raise Refused(f"there is no bucket {bucket}: make it first, or check the address")
        with suppress(FileNotFoundError):
            system.ls(path, detail=False)


def put_files(
    folder: Path, names: Sequence[str], url: str, *, say: Callable[[str], object] = lambda line: None
) -> None:
    """Send files of a folder, in this order.

    Args:
        folder: of this machine.
        names: of the files in it.
        url: of the folder there, which may exist.
        say: takes lines about the progress.

    Raises:
        Refused, Unreachable: they could not be sent.
        TimeoutError: the store takes nothing.
    """
    callbacks: Any = importlib.import_module("fsspec.callbacks")
    with converted_errors():
        system, root = open_store(url.rstrip("/"))
        for name in names:
            target, callback = f"{root}/{name}", callbacks.Callback()
            if has_folders(system):
                system.makedirs(target.rpartition("/")[0], exist_ok=True)
            put = partial(system.put_file, str(folder / name), target, callback=callback)
            run_with_stall_limit(put, partial(getattr, callback, "value"), _TAKING_S)
            say(f"sent {name}")


def remove_folder(url: str) -> None:
    """Remove a folder and its files, the ones that tell that it is whole first; nothing where there is none."""
    with converted_errors():
        system, path = open_store(url.rstrip("/"))
        if system.exists(path):
            for name in _LAST:
                if system.exists(f"{path}/{name}"):
                    system.rm_file(f"{path}/{name}")
            system.rm(path, recursive=True)


class StoreFolder(Repo):
    """A model folder at a URL; its state is named by the properties of its files."""

    help = "let HOME lie on a larger one"

    def __init__(self, url: str) -> None:
        """Args:
        url: of a folder, of any kind that fsspec knows.
        """
        self._url = url
        self.cache = _CACHE.expanduser()
        self._copy: Path | None = None
        self._paths: dict[str, str] = {}
        self._system: Any = None

    def cached(self, revision: str) -> Path | None:
        """As of Repo; without a revision, the copy that was fetched last."""
        if revision:
            folders = [self.cache / revision]
        else:
            url_files = sorted(self.cache.glob("*/.url"), key=lambda path: -path.stat().st_mtime)
            folders = [path.parent for path in url_files if path.read_text(encoding="utf-8") == self._url]
        return next((folder for folder in folders if folder.is_dir()), None)

    def list(self, revision: str) -> Listing:
        """As of Repo."""
        with converted_errors():
            self._system, path = open_store(self._url.rstrip("/"))
            is_folder, files = listing_of(self._system, path)
        if not is_folder:
            raise Refused("it is a file: give the address of the model's folder")
        infos = {name_below(path, name): info for name, info in files.items()}
        self._paths = {name_below(path, name): name for name in files}
        key = key_of(self._url, infos)
        if revision and revision != key:
            raise Refused(f"its files have changed since ({key}, and {revision} is asked for): put them back")
        return Listing(
            revision=key, sizes={name: int(info["size"] or 0) for name, info in infos.items()}, sha256={}
        )

    def get(self, listing: Listing, names: Sequence[str]) -> Path:
        """As of Repo."""
        folder = self._copy = self.cache / listing.revision
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not (folder / name).is_file():
                with converted_errors():
                    _get(self._system, self._paths[name], folder, name, listing.sizes[name])
        (folder / ".url").write_text(self._url, encoding="utf-8")
        return folder

    def traffic(self) -> int:
        """As of Repo."""
        return size_of(self._copy) if self._copy is not None else 0

    def prepare(self, options: Sending) -> None:
        """As of Repo; nothing may lie there."""
        check_store(self._url)
        names = list(_infos(self._url))
        if names:
            raise Refused(f"{names[0]} lies there already: name an empty folder, or one that does not exist")

    def send(self, folder: Path, options: Sending) -> Listing:
        """As of Repo; files that tell that the model is whole go last."""
        files = [path for path in folder.rglob("*") if path.is_file()]
        files.sort(key=lambda path: (path.name in _LAST, path))
        put_files(folder, [path.relative_to(folder).as_posix() for path in files], self._url, say=options.say)
        sizes = {name: int(info["size"] or 0) for name, info in _infos(self._url).items()}
        return Listing(revision="", sizes=sizes, sha256={})


def _infos(url: str) -> Mapping[str, Mapping[str, Any]]:
    """Properties of each file below a URL, by its path there; none where there is no such folder."""
    with converted_errors():
        system, path = open_store(url.rstrip("/"))
        try:
            is_folder, files = listing_of(system, path)
        except FileNotFoundError:
            return {}
    return {name_below(path, name): info for name, info in files.items()} if is_folder else {}


@contextmanager
def converted_errors() -> Iterator[None]:
    """Errors of a store's client as Refused or Unreachable."""
    try:
        yield
    except (Refused, Unreachable, TimeoutError):
        raise
    except Exception as error:
        raise convert_error(error) from error


def _get(system: Any, path: str, folder: Path, name: str, stated: int | None) -> None:
    """Fetch one file into a folder, where it appears when it is whole.

    Args:
        system: of fsspec.
        path: of the file in it.
        folder: of this machine.
        name: of the file there.
        stated: its bytes, as the store says; None where it does not.

    Raises:
        ValueError: the name leads out of the folder.
        ConnectionError: it is not whole.
        Exception: of the store's client, for other reasons.
    """
    target = folder / name
    if not target.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the file name {name!r} leads out of the folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    broken = target.with_name(
        f".{target.name}-{uuid.uuid4().hex}.incomplete"
    )  # another process may fetch it too
    callbacks: Any = importlib.import_module("fsspec.callbacks")
    bar = callbacks.TqdmCallback(
        {"desc": name, "unit": "B", "unit_scale": True, "leave": False, "disable": None}
    )
    cause = ""
    try:
        try:
            with bar:
                system.get_file(path, str(broken), callback=bar)
        except Exception as error:
            if not broken.exists() or is_refusal(root_error(error)) or is_of_disk(error):
                raise
            cause = f" ({type(error).__name__})"
        num_bytes = broken.stat().st_size
        if cause or (stated is not None and num_bytes != int(stated)):
            size = "" if stated is None else f" of {stated}"
            raise ConnectionError(f"{name} broke off after {num_bytes}{size} bytes{cause}")
        broken.rename(target)
    finally:
        broken.unlink(missing_ok=True)


def _has_bucket(system: Any, bucket: str) -> bool:
    """True where there is a bucket; where we may not ask for it as a whole, the folder in it may be ours."""
    try:
        with suppress(PermissionError):
            system.info(bucket)
    except FileNotFoundError:
        return False
    return True


def has_folders(system: Any) -> bool:
    kinds = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
    return not kinds & _WITHOUT_FOLDERS
