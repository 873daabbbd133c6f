"""What a URL names, through fsspec: object stores, HDFS, web servers, this machine."""

from __future__ import annotations

import errno
import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from strop.hub.remote import Listing, Refused, Unreachable
from strop.hub.waiting import size_of

_IDENTITY = ("size", "etag", "checksum", "md5", "generation", "version", "mtime", "lastmodified", "last_modified",
             "updated", "created", "modified")  # fmt: skip
"""What stores say about the contents of a file, in lower case; each store says some of them."""
CACHE = Path("~/.cache/strop/models")


def open_store(url: str) -> tuple[Any, str]:
    """The file system of fsspec that a URL needs, and the path in it."""
    fsspec: Any = importlib.import_module("fsspec.core")
    system, path = fsspec.url_to_fs(url)
    return system, path


def listing_of(system: Any, path: str) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
    """What the store says about a path, and about the files there by their names."""
    info: Mapping[str, Any] = system.info(path)
    return info, system.find(path, detail=True) if info["type"] == "directory" else {path: info}


def name_below(path: str, name: str) -> str:
    """What a file is called in a copy: its path below the folder, or the last part of its own name."""
    if name == path:
        # A web address may end in ?query.
        return PurePosixPath(urlsplit(name).path if "://" in name else name).name
    return PurePosixPath(name.removeprefix(path).lstrip("/")).as_posix()


def key_of(url: str, infos: Mapping[str, Mapping[str, Any]]) -> str:
    """A name for the contents of these files at a URL: another one when the store says that they changed."""
    state = hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=12)
    for local, info in sorted(infos.items()):
        named = {str(key).lower(): value for key, value in info.items()}
        state.update(repr((local, [(key, str(named[key])) for key in _IDENTITY if key in named])).encode())
    return state.hexdigest()


def inside(folder: Path, name: str) -> Path:
    """Where a file of a store goes.

    Raises:
        ValueError: its name leads out of the folder.
    """
    target = folder / name
    if not target.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the file name {name!r} leads out of the folder")
    return target


def way_out(error: Exception) -> str:
    """What to do about an error of a store."""
    if isinstance(error, FileNotFoundError):
        return "check the address"
    if isinstance(error, ImportError):
        return "install the package that it names"
    if isinstance(error, ValueError) and "rotocol" in str(error):
        return "use a kind of URL that fsspec knows, such as s3://, gs://, https:// or file://"
    if isinstance(error, TimeoutError):
        return "check the address, and that this machine can reach it"
    return "check the address, and that this machine may read it"


def reason(error: Exception) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class StoredModel:
    """A model folder at a URL."""

    help = "let HOME lie on a larger one"

    def __init__(self, url: str) -> None:
        """Args:
        url: of a folder, of any kind that fsspec knows.
        """
        self._url = url
        self.cache = CACHE.expanduser()
        self._names: dict[str, str] = {}
        self._system: Any = None

    def cached(self, revision: str) -> Path | None:
        """As of Remote; without a revision, the copy that was fetched last."""
        if revision:
            folders = [self.cache / revision]
        else:
            own = sorted(self.cache.glob("*/.url"), key=lambda path: -path.stat().st_mtime)
            folders = [path.parent for path in own if path.read_text(encoding="utf-8") == self._url]
        return next((folder for folder in folders if folder.is_dir()), None)

    def list(self, revision: str) -> Listing:
        """As of Remote."""
        try:
            self._system, path = open_store(self._url.rstrip("/"))
            root, found = listing_of(self._system, path)
        except Exception as error:
            raise self._translated(error) from error
        if root["type"] != "directory":
            raise Refused("it is a file: give the address of the model's folder")
        infos = {name_below(path, name): info for name, info in found.items()}
        self._names = {name_below(path, name): name for name in found}
        key = key_of(self._url, infos)
        if revision and revision != key:
            raise Refused(f"its files have changed since ({key}, and {revision} is asked for): put them back")
        return Listing(
            revision=key, sizes={name: int(info["size"] or 0) for name, info in infos.items()}, sha256={}
        )

    def get(self, listing: Listing, name: str) -> Path:
        """As of Remote."""
        whole = self.cache / listing.revision
        if (whole / name).is_file():
            return whole / name
        target = inside(self.cache / f"{listing.revision}.part", name)
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            broken = target.with_name(f"{target.name}.incomplete")
            try:
                self._system.get_file(self._names[name], str(broken))
            except Exception as error:
                raise self._translated(error) from error
            if broken.stat().st_size != listing.sizes[name]:
                raise Unreachable(
                    f"{name} broke off after {broken.stat().st_size} of {listing.sizes[name]} bytes; start again"
                )
            broken.rename(target)
        return target

    def finish(self, listing: Listing) -> Path:
        """As of Remote."""
        folder = self.cache / listing.revision
        if not folder.is_dir():
            staging = self.cache / f"{listing.revision}.part"
            (staging / ".url").write_text(self._url, encoding="utf-8")
            staging.rename(folder)
        return folder

    def traffic(self) -> int:
        """As of Remote."""
        return sum(size_of(path) for path in self.cache.glob("*.part"))

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error
        if isinstance(error, FileNotFoundError | ImportError | ValueError | PermissionError):
            return Refused(f"{reason(error)}; {way_out(error)}")
        return Unreachable(f"{reason(error)}; {way_out(error)}")
