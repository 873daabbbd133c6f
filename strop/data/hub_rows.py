"""Rows that lie elsewhere: data sets of hubs, and what URLs name.

    hub:openai/gsm8k:main@test     owner/name, then optionally :config, @split (train by default) and #revision
    modelscope:ORG/NAME@test       the same at ModelScope
    s3://bucket/train.parquet      any URL that fsspec knows; file:// and memory:// too

What a URL names is fetched once into the cache folder, under a key made of the URL and of what the store says
about the contents (size, etag, time of change), so a changed file is fetched again. A fetch ends with one
rename: a reader sees all of it or nothing, also when two processes fetch at the same time.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.data import huggingface_sets, modelscope_sets
from strop.data.cache import cache_folder, use
from strop.utils.hub.repo import SILENCE_S, Refused, Unreachable, reason, run_with_stall_limit
from strop.utils.hub.store_errors import remedy, root_error
from strop.utils.hub.stores import get_folder, key_of, listing_of, name_below, open_store
from strop.utils.remote_path import HUBS
from strop.utils.trust import ask, may_run

logger = logging.getLogger(__name__)

_HUB = re.compile(
    r"(?P<hub>hub:|modelscope:)(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^:@#]+))?(?:@(?P<split>[^@#]+))?"
    r"(?:#(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)

_FILE_SETTINGS = ("*data.train_files", "*data.val_files")
"""Settings that name files with rows, in whatever section."""


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """One split of a data set of the hub."""

    hub: str
    """`hub:` or `modelscope:`."""
    name: str
    """`owner/name`; at the Hugging Face hub also `name`, for those without an owner."""
    config: str | None
    """One of its configurations; None: its only one."""
    split: str
    """One of its splits."""
    revision: str = ""
    """Branch, tag or commit; empty: the newest. At ModelScope also a state of one, BRANCH/files-HASH."""


def _ask(entry: str) -> None:
    """Pass the door, which is open where the user has named the files."""
    if not any(map(may_run, _FILE_SETTINGS)):
        ask("data files", entry)


def parse_hub(entry: str) -> HubSource:
    """The parts of `hub:owner/name[:config][@split][#revision]`, or of `modelscope:` and the same.

    Raises:
        ValueError: it has another form.
    """
    match = _HUB.fullmatch(entry)
    prefix = next((hub for hub in HUBS if entry.startswith(hub)), HUBS[0])
    if match is None or (prefix == "modelscope:" and "/" not in match["name"]):
        raise ValueError(
            f"data entry {entry!r} names no data set of the hub; write {prefix}owner/name, then optionally "
            f":config, @split and #revision, for example {prefix}openai/gsm8k:main@test"
        )
    return HubSource(
        hub=prefix,
        name=match["name"],
        config=match["config"],
        split=match["split"] or "train",
        revision=match["revision"] or "",
    )


def commit_of(entry: str, say: Callable[[str], object]) -> str:
    """The commit that an entry of a hub stands for now; at ModelScope, the state of its files, which are fetched.

    Args:
        entry: of data.train_files or of another such setting.
        say: hears when the hub is not asked, or does not answer, and its cache says which commit it is.

    Raises:
        ValueError: the entry has another form, or nobody knows.
        UntrustedCode: received settings name it.
    """
    source = parse_hub(entry)
    _ask(entry)
    try:
        if source.hub == "modelscope:":
            return modelscope_sets.resolved(source.name, source.revision, say)
        return huggingface_sets.resolved(source.name, source.revision, say)
    except (Refused, Unreachable) as error:
        hub = "ModelScope" if source.hub == "modelscope:" else "the hub"
        raise ValueError(f"data entry {entry!r} cannot be read from {hub}: {error}") from error


def open_hub(entry: str) -> Any:
    """The `datasets.Dataset` of a split of a hub data set.

    That of the Hugging Face hub is downloaded by `datasets`, which keeps it in its own cache.

    Raises:
        ValueError: the entry has another form, or `datasets` cannot read it, with its reason.
    """
    source = parse_hub(entry)
    _ask(entry)
    if source.hub == "modelscope:":
        return _open_scope(entry, source)
    datasets: Any = importlib.import_module("datasets")  # heavy, and only some entries need it
    try:
        if source.revision:
            commit = huggingface_sets.resolved(source.name, source.revision, logger.info)
            return huggingface_sets.open_at(source.name, source.config, source.split, commit)
        return datasets.load_dataset(source.name, source.config, split=source.split)
    except Exception as error:
        # The hub's client, its HTTP library and the readers of formats raise errors of their own kinds.
        raise ValueError(
            f"data entry {entry!r} cannot be read from the hub ({reason(error)}); check name, config and "
            f"split, or download it where there is a network (hf download {source.name} --repo-type dataset "
            f"--local-dir DIR) and name DIR@{source.split}"
        ) from error


def _open_scope(entry: str, source: HubSource) -> Any:
    try:
        return modelscope_sets.open_at(source.name, source.config, source.split, source.revision, logger.info)
    except (Refused, Unreachable) as error:
        raise ValueError(f"data entry {entry!r} cannot be read from ModelScope: {error}") from error
    except Exception as error:  # the readers of formats raise errors of their own kinds
        raise ValueError(
            f"data entry {entry!r} cannot be read by datasets ({reason(error)}); check config and split, or name "
            f"files of it"
        ) from error


def fetch(
    url: str, suffixes: tuple[str, ...], cache_dir: str | Path = "", *, silence_s: float = SILENCE_S
) -> Path:
    """A local copy of what a URL names: a file, or a folder with the files in it that end as wanted.

    Args:
        url: of any kind that fsspec knows.
        suffixes: of the files that are taken from a folder.
        cache_dir: folder of the cache; empty means the default.
        silence_s: longest time for the store to answer, and to send the next bytes of a file, in seconds.

    Raises:
        ValueError: the kind of URL is unknown or needs a package, nothing is there, or the store failed or went
            silent.
    """
    _ask(url)
    try:
        system, path = open_store(url)
        is_folder, listing = run_with_stall_limit(lambda: listing_of(system, path), lambda: 0, silence_s)
        names = {name_below(path, name): name for name in listing if not is_folder or name.endswith(suffixes)}
        if not names:
            raise FileNotFoundError(f"the folder holds no {', '.join(suffixes)} files")
        infos = {local: listing[name] for local, name in names.items()}
        folder = cache_folder(cache_dir) / "files" / key_of(url, infos)
        if not folder.is_dir():
            sizes = {local: info.get("size") for local, info in infos.items()}
            get_folder(system, names, folder, sizes=sizes, silence_s=silence_s)
        use(folder)
    except Exception as error:
        # Every store has its own client with its own kinds of errors.
        error = root_error(error)
        raise ValueError(
            f"data entry {url!r} cannot be fetched ({reason(error)}); {remedy(error)}"
        ) from error
    return folder if is_folder else folder / next(iter(names))
