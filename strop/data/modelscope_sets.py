"""Data sets of ModelScope at one state: its files are fetched whole, and `datasets` reads them from their folder.

The client tells no commit of a branch, so a state is named by the hashes of its files; `BRANCH/STATE` says where it was
found, for a machine that has to fetch it again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from strop.utils.hub.modelscope import MAIN, STATE, ModelScopeRepo
from strop.utils.hub.repo import Refused, Unreachable, run_with_stall_limit

_LEFT_OUT = (".py", ".gitattributes", ".gitignore")
"""Endings of files that hold no rows; code of a data set is never fetched."""


def resolved(name: str, revision: str, say: Callable[[str], object]) -> str:
    """The state of a branch, tag or commit (empty: the main branch), as `BRANCH/STATE`; its files are here then.

    Raises:
        Refused: there is no such set or revision.
        Unreachable: ModelScope does not answer, and the cache has no copy.
    """
    if revision.rpartition("/")[2].startswith(STATE):
        return revision
    return f"{revision or MAIN}/{_folder(name, revision, say).name}"


def open_at(name: str, config: str | None, split: str, revision: str, say: Callable[[str], object]) -> Any:
    """The `datasets.Dataset` of a split at a state, or at what a branch, tag or commit stands for now.

    Raises:
        Refused, Unreachable: the files cannot be had.
        Exception: what `datasets` raises.
    """
    folder = _folder(name, revision, say)
    datasets: Any = importlib.import_module("datasets")
    return datasets.load_dataset(str(folder), config, split=split)


def _folder(name: str, revision: str, say: Callable[[str], object]) -> Path:
    repo = ModelScopeRepo(name, "dataset")
    cached = repo.cached(revision)
    if cached is not None and revision.rpartition("/")[2] == cached.name:
        return cached  # a state does not change
    try:
        listing = run_with_stall_limit(partial(repo.list, revision), repo.traffic)
    except (Unreachable, TimeoutError) as error:
        if cached is None:
            raise Unreachable(f"{error}; check the network, or name a folder that has its files") from error
        say(f"{error}; the copy of the data set modelscope:{name} in {cached} is used")
        return cached
    names = [file for file in sorted(listing.sizes) if not file.endswith(_LEFT_OUT)]
    if not names:
        raise Refused("it has no files with rows")
    if repo.cached(listing.revision) is None:
        total = sum(listing.sizes[file] for file in names)
        say(f"fetching the data set modelscope:{name}: {len(names)} files, {total / 2**20:.1f} MiB")
    try:
        return run_with_stall_limit(partial(repo.get, listing, names), repo.traffic)
    except TimeoutError as error:
        raise Unreachable(str(error)) from error
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):
            raise
        raise Refused(f"{repo.cache}: {error.strerror or error}; {repo.help}") from error
