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

from strop.data.hub.remote import Listing, Refused, Unreachable
from strop.data.hub.scope import MAIN, STATE, ScopeData
from strop.data.hub.waiting import check_room, taking_turns, while_heard

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
    remote = ScopeData(name)
    kept = remote.cached(revision)
    if kept is not None and revision.rpartition("/")[2] == kept.name:
        return kept  # a state does not change
    try:
        listing = while_heard(partial(remote.list, revision), remote.traffic)
    except (Unreachable, TimeoutError) as error:
        if kept is None:
            raise Unreachable(f"{error}; check the network, or name a folder that has its files") from error
        say(f"{error}; the copy of the data set modelscope:{name} in {kept} is used")
        return kept
    try:
        return _fetched(remote, name, listing, say)
    except TimeoutError as error:
        raise Unreachable(str(error)) from error
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):
            raise
        raise Refused(f"{remote.cache}: {error.strerror or error}; {remote.help}") from error


def _fetched(remote: ScopeData, name: str, listing: Listing, say: Callable[[str], object]) -> Path:
    names = [one for one in sorted(listing.sizes) if not one.endswith(_LEFT_OUT)]
    if not names:
        raise Refused("it has no files with rows")
    with taking_turns(remote, f"dataset {name}"):
        if remote.cached(listing.revision) is None:
            total = sum(listing.sizes[one] for one in names)
            check_room(remote.cache, total)
            say(f"fetching the data set modelscope:{name}: {len(names)} files, {total / 2**20:.1f} MiB")
            for one in names:
                while_heard(partial(remote.get, listing, one), remote.traffic)
        return remote.finish(listing)
