"""What a URL names, through fsspec: object stores, HDFS, web servers, this machine."""

from __future__ import annotations

import errno
import hashlib
import importlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from strop.data.cache import size_of
from strop.data.hub.files import settle
from strop.data.hub.remote import Listing, Refused, Unreachable

_IDENTITY = ("size", "etag", "checksum", "md5", "md5hash", "contentmd5", "crc32c", "digest", "generation", "version",
             "versionid", "mtime", "lastmodified", "modificationtime", "updated", "created", "modified")  # fmt: skip
"""What stores say about the contents of a file, in lower case without dashes; each store says some of them."""
_DENIED = (401, 403)
"""HTTP status of an answer to somebody who may not."""
_EXTRAS = {"s3fs": "'strop[s3]'", "gcsfs": "'strop[gcs]'"}
"""What brings a client of a store: an extra, where there is one."""
CACHE = Path("~/.cache/strop/models")


def open_store(url: str) -> tuple[Any, str]:
    """The file system of fsspec that a URL needs, and the path in it."""
    fsspec: Any = importlib.import_module("fsspec.core")
    logging.getLogger("gcsfs").setLevel(logging.ERROR)  # it warns at every call without credentials
    system, path = fsspec.url_to_fs(url)
    system.invalidate_cache()  # what it saw earlier in this process
    return system, path


def listing_of(system: Any, path: str) -> tuple[bool, Mapping[str, Mapping[str, Any]]]:
    """Whether a path is a folder, and what the store says about the files there by their names.

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
    """What a file is called in a copy: its path below the folder, or the last part of its own name."""
    name, path = name.lstrip("/"), path.lstrip("/")  # some stores begin names of one kind alone with it
    if name == path:
        # A web address may end in ?query.
        return PurePosixPath(urlsplit(name).path if "://" in name else name).name
    return PurePosixPath(name.removeprefix(path).lstrip("/")).as_posix()


def key_of(url: str, infos: Mapping[str, Mapping[str, Any]]) -> str:
    """A name for the contents of these files at a URL: another one when the store says that they changed."""
    state = hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=12)
    for local, info in sorted(infos.items()):
        named = {re.sub("[-_]", "", str(key)).lower(): value for key, value in info.items()}
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


def get_file(system: Any, path: str, target: Path, *, name: str, stated: int | None) -> None:
    """Fetch one file.

    Args:
        system, path: the store, and where the file is in it.
        target: where it goes; a part of it stays there when the connection breaks.
        name: what it is called in sentences.
        stated: its bytes, as the store says; None where it does not.

    Raises:
        ConnectionError: it is not whole.
        Exception: of the store's client, for other reasons.
    """
    why = ""
    try:
        system.get_file(path, str(target))
    except Exception as error:
        if not target.exists() or is_refusal(meant_by(error)) or _is_of_disk(error):
            raise
        why = f" ({type(error).__name__})"
    found = target.stat().st_size
    if why or (stated is not None and found != int(stated)):
        size = "" if stated is None else f" of {stated}"
        raise ConnectionError(f"{name} broke off after {found}{size} bytes{why}")


def meant_by(error: Exception) -> Exception:
    """What lies under an error: fsspec says of whatever fails on the web that there is no such file."""
    below = error.__cause__
    is_web = isinstance(error, FileNotFoundError) and type(below).__module__.startswith("aiohttp")
    return below if is_web and isinstance(below, Exception) and _status(below) != 404 else error


def is_refusal(error: Exception) -> bool:
    """Whether asking again is of no use: there is no such thing, or it is not for us, or a package is missing."""
    kinds = (FileNotFoundError, ImportError, ValueError, PermissionError)
    return isinstance(error, kinds) or _status(error) == 404 or _is_denied(error) or _is_of_java(error)


def way_out(error: Exception) -> str:
    """What to do about an error of a store."""
    if isinstance(error, FileNotFoundError) or _status(error) == 404:
        return "check the address"
    if _is_denied(error):
        return (
            "the store asks who you are: give its client what lets it in (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY or AWS_PROFILE for s3://, GOOGLE_APPLICATION_CREDENTIALS for gs://)"
        )
    if _is_of_java(error):
        return (
            "hdfs:// goes through Hadoop's library, which needs JAVA_HOME, HADOOP_HOME and CLASSPATH; pip install "
            "hdfs-native needs none of them, and webhdfs://HOST:PORT/FOLDER the package requests alone"
        )
    if isinstance(error, ImportError):
        package = _package(error)
        return (
            f"pip install {_EXTRAS.get(package, package)}" if package else "install the package that it names"
        )
    if isinstance(error, ValueError) and "rotocol" in str(error):
        return "use a kind of URL that fsspec knows, such as s3://, gs://, https:// or file://"
    if isinstance(error, ConnectionError) and "broke off" in str(error):
        return "start again"
    if isinstance(error, TimeoutError):
        return "check the address, and that this machine can reach it"
    return "check the address, and that this machine may read it"


def _package(error: ImportError) -> str:
    """The package that a client of fsspec lacks, whose own error says only in words which one it is."""
    below = error if error.name else error.__cause__
    return (getattr(below, "name", None) or "").partition(".")[0]


def _status(error: Exception) -> int | None:
    """The HTTP status that a client's error carries."""
    name = "status" if hasattr(error, "status") else "code"
    found = getattr(error, name, None)
    return int(found) if isinstance(found, int | str) and str(found).isdecimal() else None


def _is_denied(error: Exception) -> bool:
    is_unknown = "credential" in type(error).__name__.lower()
    is_forbidden = isinstance(error, OSError) and str(error).startswith("Forbidden")  # all that gcsfs says
    return isinstance(error, PermissionError) or is_unknown or is_forbidden or _status(error) in _DENIED


def _is_of_disk(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_of_java(error: Exception) -> bool:
    return isinstance(error, OSError) and any(
        name in str(error) for name in ("libjvm", "libhdfs", "CLASSPATH")
    )


def reason(error: BaseException) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def translated(error: Exception) -> Exception:
    """What an error of a store's client means, as Refused or Unreachable."""
    error = meant_by(error)
    kind = Refused if is_refusal(error) else Unreachable
    return kind(f"{reason(error)}; {way_out(error)}")


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
            is_folder, found = listing_of(self._system, path)
        except Exception as error:
            raise error if _is_of_disk(error) else translated(error) from error
        if not is_folder:
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
                get_file(self._system, self._names[name], broken, name=name, stated=listing.sizes[name])
            except Exception as error:
                raise error if _is_of_disk(error) else translated(error) from error
            broken.rename(target)
        return target

    def finish(self, listing: Listing) -> Path:
        """As of Remote."""
        folder, staging = self.cache / listing.revision, self.cache / f"{listing.revision}.part"
        if staging.is_dir():
            (staging / ".url").write_text(self._url, encoding="utf-8")
            settle(staging, folder)
        return folder

    def traffic(self) -> int:
        """As of Remote."""
        return sum(size_of(path) for path in self.cache.glob("*.part"))
