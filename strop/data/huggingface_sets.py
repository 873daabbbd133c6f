"""Data sets of the Hugging Face hub at one commit.

`datasets` prepares a set once per commit and keeps it. Without a network it takes the newest set that it has prepared,
whichever commit is asked for; what is opened here is of the commit that is named, or nothing is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strop.utils.hub.huggingface import COMMIT, HuggingFaceRepo
from strop.utils.hub.repo import Refused, Unreachable


def resolved(name: str, revision: str, say: Callable[[str], object]) -> str:
    """The commit of a branch or tag (empty: the main one); the hub is asked where it can be.

    Raises:
        Refused: the hub has no such set or revision, or is not asked and its cache does not say.
        Unreachable: it does not answer, and its cache does not say.
    """
    if COMMIT.fullmatch(revision):
        return revision
    repo = HuggingFaceRepo(name, "dataset")
    if not repo.is_offline:
        try:
            listing = repo.list(revision)
        except Unreachable as error:
            commit = _cached_commit(repo, name, revision)
            if not commit:
                raise
            say(f"{error}; of the data set {name}, commit {commit} is used, which the cache has")
            return commit
        repo.store_commit(revision, listing)
        return listing.revision
    commit = _cached_commit(repo, name, revision)
    if not commit:
        raise Refused(
            f"HF_HUB_OFFLINE is set, and the cache does not say which commit {revision or 'the newest'} is: read it "
            f"once without, or write #COMMIT after the entry"
        )
    return commit


def open_at(name: str, config: str | None, split: str, commit: str) -> Any:
    """The `datasets.Dataset` of a split at a commit.

    Raises:
        ValueError: neither the hub gives this commit, nor is it among what was prepared.
        Exception: what `datasets` raises.
    """
    datasets: Any = importlib.import_module("datasets")
    try:
        builder = datasets.load_dataset_builder(name, config, revision=commit)
    except Exception:  # the client and its HTTP library raise errors of their own kinds
        builder = None
        if not _prepared(name, config or "*", commit):
            raise
    if builder is None or builder.hash != commit:
        builder = _from_cache(name, config, commit)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _from_cache(name: str, config: str | None, commit: str) -> Any:
    folders = _prepared(name, config or "*", commit)
    if len(folders) > 1:
        names = ", ".join(folder.parts[-3] for folder in folders)
        raise ValueError(f"the cache has the configurations {names} of it: name one of them")
    if not folders:
        raise ValueError(f"the hub was not reached, and the cache has it at other commits than {commit}")
    config_name, version, _ = folders[0].parts[-3:]
    cache: Any = importlib.import_module("datasets.packaged_modules.cache.cache")
    return cache.Cache(
        dataset_name=name.rpartition("/")[2],
        repo_id=name,
        config_name=config_name,
        version=version,
        hash=commit,
    )


def _prepared(name: str, config: str, commit: str) -> list[Path]:
    """Folders CONFIG/VERSION/COMMIT that `datasets` has prepared; the one that was made last is the last."""
    settings: Any = importlib.import_module("datasets.config")
    naming: Any = importlib.import_module("datasets.naming")
    *owner, last = name.split("/")
    root = Path(settings.HF_DATASETS_CACHE) / "___".join([*owner, naming.camelcase_to_snakecase(last)])
    folders = [path for path in root.glob(f"{config}/*/{commit}") if (path / "dataset_info.json").is_file()]
    return sorted(folders, key=lambda path: path.stat().st_mtime)


def _cached_commit(repo: HuggingFaceRepo, name: str, revision: str) -> str:
    """The commit by the caches: that which was noted, else the one that was prepared last; empty without any."""
    commit = repo.stored_commit(revision)
    if commit or revision not in ("", "main"):
        return commit
    commits = [path.name for path in _prepared(name, "*", "*") if COMMIT.fullmatch(path.name)]
    return commits[-1] if commits else ""
