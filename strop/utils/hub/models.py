"""Fetching of models: from the name of a model to a folder of this machine."""

from __future__ import annotations

import errno
import logging
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strop.utils.atomic_io import sha256_of_file
from strop.utils.hub.addresses import ModelAddress, parse_address
from strop.utils.hub.huggingface import HuggingFaceRepo
from strop.utils.hub.model_files import ADAPTER, INDEX, lacking, settings_files, weight_files
from strop.utils.hub.modelscope import ModelScopeRepo
from strop.utils.hub.repo import SILENCE_S, Listing, Refused, Repo, Unreachable, run_with_stall_limit
from strop.utils.hub.stores import StoreFolder
from strop.utils.safe_read import read_json
from strop.utils.trust import ask

logger = logging.getLogger(__name__)

Say = Callable[[str], object]
"""Takes one line for the person who watches."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A model in a folder of this machine."""

    address: ModelAddress
    """Its origin."""
    folder: str
    revision: str
    """The commit, or the key of a state of a store."""


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Options of a fetch."""

    say: Say = lambda line: None
    code: bool = False
    """Fetch Python files too (model.trust_remote_code)."""
    weights: bool = True
    """Fetch weights; without, settings and tokenizer alone."""
    offline: bool = False
    """Contact nobody: take what is in the cache (also HF_HUB_OFFLINE=1)."""
    silence_s: float = SILENCE_S
    """Time for which a hub or store may send nothing, in seconds."""


def fetch_model(
    text: str, options: Fetch, *, key: str = "model.path", revision: str = "", state: str = ""
) -> Fetched:
    """The folder of a model that lies elsewhere, once it is fetched.

    Args:
        text: ORG/NAME, modelscope:ORG/NAME or a URL, and no folder of this machine.
        options: kinds of files, and the reporter of progress.
        key: setting that `text` is from, for error sentences.
        revision: branch, tag or commit; empty: the one in `text`, else the main one.
        state: the revision that an earlier fetch resolved, in place of any other.

    Raises:
        ValueError: the name has no known form, or the model cannot be fetched: the sentence says why, and what to do.
        UntrustedCode: received settings name it.
    """
    address = parse_address(text, key)
    if revision and address.kind == "url":
        raise ValueError(
            f"a revision ({revision}) is given beside {key}={text}, which is a URL and has none: leave it out"
        )
    if revision and address.revision not in ("", revision):
        raise ValueError(
            f"{key} {text!r} names a revision, and {revision!r} is another one: leave one of them out"
        )
    ask(key, f"{text} (fetched)")
    branch = revision or address.revision
    if state and branch and address.kind == "modelscope":
        state = f"{branch}/{state}"  # its client finds a state again only on the branch that has it
    address = ModelAddress(kind=address.kind, name=address.name, revision=state or branch)
    complaint = f"{key} {str(address)!r} cannot be fetched"
    try:
        repo = repo_of(address)
    except (Refused, OSError) as error:
        raise ValueError(f"{complaint}: {error}") from error
    try:
        folder = _folder(address, repo, options)
    except (Refused, Unreachable, TimeoutError) as error:
        raise ValueError(f"{complaint}: {error}") from error
    except OSError as error:
        raise ValueError(f"{complaint}: {_disk_error(error, repo)}") from error
    return Fetched(address=address, folder=str(folder), revision=folder.name)


def hashes(folder: Path) -> dict[str, dict[str, int | str]]:
    """Size in bytes and SHA-256 of every file of a model, by its name; reads all of them."""
    hashes_by_name: dict[str, dict[str, int | str]] = {}
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    index = read_json(folder / INDEX) if INDEX in names else None
    weights = weight_files(names, index) if any(name.endswith(".safetensors") for name in names) else []
    for name in sorted({*settings_files(names, code=True), *weights}):
        path = folder / name
        hashes_by_name[name] = {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
    return hashes_by_name


_SNAPSHOT = re.compile(r"models--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})", re.ASCII)


def fetch_copy(
    folder: Path, *, weights: bool, tokenizer: bool = False, code: bool = False, offline: bool = False
) -> None:
    """Fetch the missing files of a folder of the hub's cache that the run was begun with on another one.

    Nothing happens for any other folder, or where all is there. A process that comes while another one fetches waits.

    Args:
        folder: perhaps of the hub's cache; it need not exist.
        weights: they are needed.
        tokenizer: it is needed.
        code: fetch Python files too.
        offline: contact nobody.

    Raises:
        ValueError: it cannot be fetched, or the cache of this machine is elsewhere.
    """
    match = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    if match is None:
        return
    has_settings = any((folder / name).is_file() for name in ("config.json", ADAPTER))
    if has_settings and not lacking(folder, weights=weights, tokenizer=tokenizer):
        return
    name = match["name"].replace("--", "/")
    options = Fetch(say=logger.info, weights=weights, code=code, offline=offline)
    fetched = fetch_model(f"hub:{name}@{match['commit']}", options)
    if Path(fetched.folder) != folder:
        raise ValueError(
            f"this machine ({platform.node()}) keeps {name} in {fetched.folder}, and the run began with {folder}: set "
            f"HF_HOME to the same folder on every machine"
        )


def repo_of(address: ModelAddress) -> Repo:
    """The repository or folder at an address, which is none of this machine.

    Raises:
        Refused: its client is not installed.
    """
    kinds: dict[str, Callable[[str], Repo]] = {
        "huggingface": HuggingFaceRepo,
        "modelscope": ModelScopeRepo,
        "url": StoreFolder,
    }
    return kinds[address.kind](address.name)


def _folder(address: ModelAddress, repo: Repo, options: Fetch) -> Path:
    """The folder of the model, named like its state, once all requested files lie there."""
    revision, cached = address.revision, repo.cached(address.revision)
    is_offline = options.offline or repo.is_offline
    if cached is not None and cached.name == revision.rpartition("/")[2] and _is_complete(cached, options):
        return cached
    is_usable = cached is not None and not _lack(cached, options)
    if is_offline:
        if cached is None or not is_usable:
            raise Refused(_not_cached(repo, revision, options))
        return cached
    try:
        listing = run_with_stall_limit(partial(repo.list, revision), repo.traffic, options.silence_s)
    except (Unreachable, TimeoutError) as error:
        if cached is None or not is_usable:
            raise Unreachable(f"{error}. {_offline_advice(repo, revision)}") from error
        options.say(f"{error}; the copy of {address} in {cached} is used")
        return cached
    folder = _fetch_files(address, repo, listing, options)
    if isinstance(repo, HuggingFaceRepo):
        repo.store_commit(revision, listing)
    return folder


def _is_complete(folder: Path, options: Fetch) -> bool:
    """True where a copy has files of all requested kinds, so that its hub need not be asked for more."""
    return not lacking(folder, weights=options.weights) and (not options.code or any(folder.glob("*.py")))


def _lack(folder: Path, options: Fetch) -> str:
    """The first file without which a copy is of no use where its hub cannot be asked; empty where it can be used.

    Nobody knows then whether the model has code or a tokenizer of its own; loading it says what it misses.
    """
    return lacking(folder, weights=options.weights, tokenizer=not options.weights)


def _fetch_files(address: ModelAddress, repo: Repo, listing: Listing, options: Fetch) -> Path:
    def get(names: Sequence[str]) -> Path:
        return run_with_stall_limit(partial(repo.get, listing, names), repo.traffic, options.silence_s)

    names = settings_files(listing.sizes, code=options.code)
    if options.weights and "config.json" not in names and ADAPTER not in names:
        raise Refused(f"it has no config.json (it has {', '.join(sorted(listing.sizes)[:8]) or 'no files'})")
    folder = get(names)
    if not options.weights:
        return folder
    try:
        weights = weight_files(listing.sizes, read_json(folder / INDEX) if INDEX in names else None)
    except ValueError as error:
        raise Refused(str(error)) from error
    missing = [name for name in weights if not (folder / name).is_file()]
    if missing:
        size = _format_size(sum(listing.sizes[name] for name in missing))
        options.say(f"fetching {address} ({listing.revision[:12]}): {size} into {repo.cache}")
        get(missing)
        options.say(f"fetched {address}: {len(names) + len(weights)} files")
    return folder


def _not_cached(repo: Repo, revision: str, options: Fetch) -> str:
    folder = repo.cached(revision)
    setting = "HF_HUB_OFFLINE" if not options.offline else "model.local_files_only"
    state = (
        f"the cache {repo.cache} has no copy of it"
        if folder is None
        else f"its copy {folder} lacks {_lack(folder, options)}"
    )
    return f"{state}, and {setting} is set, so nobody is asked: fetch it once without, or name a folder"


def _offline_advice(repo: Repo, revision: str) -> str:
    folder = repo.cached(revision)
    half = f" (a part of it is in {folder} and is kept)" if folder is not None else ""
    return (
        f"Check the network and its proxy settings, or copy a model folder here and give that{half}; without a "
        f"network only what is in {repo.cache} can be used"
    )


def _disk_error(error: OSError, repo: Repo) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {repo.cache} is full ({error.strerror}); make room there, or {repo.help}"
    return f"{repo.cache}: {error.strerror or error}; {repo.help}"


def _format_size(num_bytes: int) -> str:
    mebibyte = 1 << 20
    return f"{num_bytes / mebibyte:.0f} MiB" if num_bytes >= 10 * mebibyte else f"{num_bytes / 1024:.0f} KiB"
