"""Where rows come from when not from a local file: data sets of the Hugging Face hub, and URLs.

    hub:openai/gsm8k:main@test     owner/name, then optionally :config and @split (train by default)
    s3://bucket/train.parquet      any URL that fsspec knows; file:// and memory:// too

What a URL names is fetched once into the cache folder, under a key made of the URL and of what the store says
about the contents (size, etag, time of change), so a changed file is fetched again. A fetch ends with one
rename: a reader sees all of it or nothing, also when two processes fetch at the same time.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from strop.base.trust import ask, may_run
from strop.data.cache import cache_folder, size_of, use

SILENCE_S = 60.0
"""How long a store may send nothing before a fetch ends, in seconds."""

T = TypeVar("T")

HUB_PREFIX = "hub:"
_HUB = re.compile(
    r"hub:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^:@]+))?(?:@(?P<split>[^@]+))?", re.ASCII
)
_URL = re.compile(r"[a-z][a-z0-9+.-]+(::[a-z][a-z0-9+.-]+)*://", re.IGNORECASE)
_IDENTITY = ("size", "etag", "checksum", "md5", "generation", "version", "mtime", "lastmodified", "last_modified",
             "updated", "created", "modified")  # fmt: skip
"""What stores say about the contents of a file, in lower case; each store says some of them."""

_FILE_SETTINGS = ("*data.train_files", "*data.val_files")
"""Settings that name files with rows, in whatever section."""


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """One split of a data set of the hub."""

    name: str
    """`owner/name`, or `name` for those without an owner."""
    config: str | None
    """Which of its configurations; None: its only one."""
    split: str
    """Which of its splits."""


def _ask(entry: str) -> None:
    """Pass the door, which is open where the user has named the files."""
    if not any(map(may_run, _FILE_SETTINGS)):
        ask("data files", entry)


def is_url(entry: str) -> bool:
    """Whether an entry of data.train_files is a URL."""
    return _URL.match(entry) is not None


def fetched(files: Iterable[str]) -> list[str]:
    """Those entries of data.train_files, or of another such setting, that are fetched from elsewhere."""
    return [entry for entry in files if is_url(entry) or entry.startswith(HUB_PREFIX)]


def parse_hub(entry: str) -> HubSource:
    """The parts of `hub:owner/name[:config][@split]`.

    Raises:
        ValueError: it has another form.
    """
    match = _HUB.fullmatch(entry)
    if match is None:
        raise ValueError(
            f"data entry {entry!r} names no data set of the hub; write hub:owner/name, then optionally "
            f":config and @split, for example hub:openai/gsm8k:main@test"
        )
    return HubSource(name=match["name"], config=match["config"], split=match["split"] or "train")


def open_hub(entry: str) -> Any:
    """The `datasets.Dataset` of a split of a hub data set; `datasets` downloads it and keeps it in its own cache.

    Raises:
        ValueError: the entry has another form, or `datasets` cannot read it, with its reason.
    """
    source = parse_hub(entry)
    _ask(entry)
    datasets: Any = importlib.import_module("datasets")  # heavy, and only some entries need it
    try:
        return datasets.load_dataset(source.name, source.config, split=source.split)
    except Exception as error:
        # The hub's client, its HTTP library and the readers of formats raise errors of their own kinds.
        raise ValueError(
            f"data entry {entry!r} cannot be read from the hub ({_reason(error)}); check name, config and "
            f"split, or download it where there is a network (hf download {source.name} --repo-type dataset "
            f"--local-dir DIR) and name DIR@{source.split}"
        ) from error


def fetch(
    url: str, suffixes: tuple[str, ...], cache_dir: str | Path = "", *, silence_s: float = SILENCE_S
) -> Path:
    """A local copy of what a URL names: a file, or a folder with the files in it that end as wanted.

    Args:
        url: of any kind that fsspec knows.
        suffixes: of the files that are taken from a folder.
        cache_dir: where copies are kept; empty means the default.
        silence_s: how long the store may take to answer, and to send the next bytes of a file, in seconds.

    Raises:
        ValueError: the kind of URL is unknown or needs a package, nothing is there, or the store failed or went
            silent.
    """
    _ask(url)
    fsspec: Any = importlib.import_module("fsspec.core")
    try:
        system, path = fsspec.url_to_fs(url)
        root, found = _while_heard(lambda: _listing(system, path), lambda: 0, silence_s)
        is_folder = root["type"] == "directory"
        wanted = {_name_below(path, name): name for name in found if _is_wanted(name, suffixes, is_folder)}
        if not wanted:
            raise FileNotFoundError(f"the folder holds no {', '.join(suffixes)} files")
        key = _key(url, {local: found[name] for local, name in wanted.items()})
        folder = cache_folder(cache_dir) / "files" / key
        if not folder.is_dir():
            _fetch_into(folder, system, wanted, silence_s)
        use(folder)
    except Exception as error:
        # Every store has its own client with its own kinds of errors.
        raise ValueError(
            f"data entry {url!r} cannot be fetched ({_reason(error)}); {_way_out(error)}"
        ) from error
    return folder if is_folder else folder / next(iter(wanted))


def _listing(system: Any, path: str) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
    """What the store says about a path, and about the files there by their names."""
    info: Mapping[str, Any] = system.info(path)
    return info, system.find(path, detail=True) if info["type"] == "directory" else {path: info}


def _while_heard(work: Callable[[], T], progress: Callable[[], int], silence_s: float) -> T:
    """The result of `work`, done in a thread of its own as long as `progress` grows.

    Stores have deadlines of their own, of minutes or none. A thread that waits for a silent store cannot be
    stopped; it is left behind and does not keep the process alive.

    Raises:
        TimeoutError: `progress` has not changed for `silence_s` seconds.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001  # raised again below, in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="fetch")
    thread.start()
    seen, heard_at = progress(), time.monotonic()
    while thread.is_alive():
        thread.join(min(silence_s / 4, 1.0))
        now = progress()
        if now != seen:
            seen, heard_at = now, time.monotonic()
        elif time.monotonic() - heard_at > silence_s and thread.is_alive():
            raise TimeoutError(f"nothing was received for {silence_s:g} s")
    if errors:
        raise errors[0]
    return results[0]


def _name_below(path: str, name: str) -> str:
    """What a file is called in the cache: its path below the folder, or the last part of its own name."""
    if name == path:
        # A web address may end in ?query.
        return PurePosixPath(urlsplit(name).path if "://" in name else name).name
    return PurePosixPath(name.removeprefix(path).lstrip("/")).as_posix()


def _is_wanted(name: str, suffixes: tuple[str, ...], is_in_folder: bool) -> bool:
    return not is_in_folder or name.endswith(suffixes)


def _key(url: str, infos: Mapping[str, Mapping[str, Any]]) -> str:
    state = hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=12)
    for local, info in sorted(infos.items()):
        named = {str(key).lower(): value for key, value in info.items()}
        state.update(repr((local, [(key, str(named[key])) for key in _IDENTITY if key in named])).encode())
    return state.hexdigest()


def _fetch_into(folder: Path, system: Any, wanted: Mapping[str, str], silence_s: float) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix="fetching-", dir=folder.parent))
    try:
        for local, name in wanted.items():
            target = staging / local
            if not target.resolve().is_relative_to(staging.resolve()):
                raise ValueError(f"the file name {local!r} leads out of the folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            _while_heard(partial(system.get_file, name, str(target)), partial(size_of, staging), silence_s)
        try:
            staging.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same contents
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _way_out(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "check the address"
    if isinstance(error, ImportError):
        return "install the package that it names"
    if isinstance(error, ValueError) and "rotocol" in str(error):
        return "use a kind of URL that fsspec knows, such as s3://, gs://, https:// or file://"
    if isinstance(error, TimeoutError):
        return "check the address, and that this machine can reach it"
    return "check the address, and that this machine may read it"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
