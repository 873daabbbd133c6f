"""From the name of a model to a folder of this machine: the one function that commands and runs call.

One process of a machine fetches; others that want the same wait for it and take what it fetched. What a broken download
left is kept, and the next one goes on from there.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from strop.data.hub.face import FaceModel
from strop.data.hub.files import ADAPTER, INDEX, lacking, wanted_settings, wanted_weights
from strop.data.hub.places import Place, place_of
from strop.data.hub.remote import Listing, Refused, Remote, Unreachable
from strop.data.hub.scope import ScopeModel
from strop.data.hub.stores import StoredModel
from strop.data.hub.waiting import SILENCE_S, check_room, in_words, taking_turns, while_heard
from strop.utils.safe_read import read_json
from strop.utils.trust import ask

logger = logging.getLogger(__name__)

T = TypeVar("T")

Say = Callable[[str], object]
"""Takes one line for the person who watches."""

_SAY_EVERY_S = {True: 2.0, False: 10.0}
"""How often it is said how far a fetch is, in seconds: on a terminal, and in a log."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A model in a folder of this machine."""

    place: Place
    """Where it came from."""
    folder: str
    revision: str
    """The commit, or the key of a state of a store."""


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """How models are fetched."""

    say: Say = lambda line: None
    code: bool = False
    """Fetch Python files too (model.trust_remote_code)."""
    weights: bool = True
    """Fetch weights; without, settings and tokenizer alone."""
    offline: bool = False
    """Contact nobody: take what is in the cache (also HF_HUB_OFFLINE=1)."""
    silence_s: float = SILENCE_S
    """How long a hub or store may send nothing, in seconds."""


def fetch_model(
    text: str, how: Fetch, *, key: str = "model.path", revision: str = "", state: str = ""
) -> Fetched:
    """The folder of a model that lies elsewhere, once it is fetched.

    Args:
        text: ORG/NAME, modelscope:ORG/NAME or a URL, and no folder of this machine.
        how: what is fetched, and who hears of it.
        key: what `text` was given as, for sentences.
        revision: branch, tag or commit; empty: the one in `text`, else the main one.
        state: the revision that an earlier fetch resolved, in place of any other.

    Raises:
        ValueError: the name means nothing, or the model cannot be had: the sentence says why, and what to do.
        UntrustedCode: received settings name it.
    """
    place = place_of(text, key)
    if revision and place.kind == "url":
        raise ValueError(
            f"a revision ({revision}) is given beside {key}={text}, which is a URL and has none: leave it out"
        )
    if revision and place.revision not in ("", revision):
        raise ValueError(
            f"{key} {text!r} names a revision, and {revision!r} is another one: leave one of them out"
        )
    ask(key, f"{text} (fetched)")
    branch = revision or place.revision
    if state and branch and place.kind == "modelscope":
        state = f"{branch}/{state}"  # its client finds a state again only on the branch that has it
    place = Place(kind=place.kind, name=place.name, revision=state or branch)
    try:
        remote = _remote(place)
        return _Fetching(place, remote, how).fetch()
    except (Refused, Unreachable, TimeoutError) as error:
        raise ValueError(f"{key} {str(place)!r} cannot be fetched: {error}") from error
    except OSError as error:
        raise ValueError(f"{key} {str(place)!r} cannot be fetched: {_of_disk(error, remote)}") from error


def hashes(folder: Path) -> dict[str, dict[str, int | str]]:
    """Size in bytes and SHA-256 of every file of a model, by its name; reads all of them."""
    found: dict[str, dict[str, int | str]] = {}
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    index = read_json(folder / INDEX) if INDEX in names else None
    weights = wanted_weights(names, index) if any(name.endswith(".safetensors") for name in names) else []
    for name in sorted({*wanted_settings(names, code=True), *weights}):
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[name] = {"bytes": (folder / name).stat().st_size, "sha256": digest}
    return found


_SNAPSHOT = re.compile(r"models--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})", re.ASCII)


def fetch_copy(
    folder: Path, *, weights: bool, tokenizer: bool = False, code: bool = False, offline: bool = False
) -> None:
    """Fetch what this machine lacks of a folder of the hub's cache that the run was begun with on another one.

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
    how = Fetch(say=logger.info, weights=weights, code=code, offline=offline)
    fetched = fetch_model(f"hub:{name}@{match['commit']}", how)
    if Path(fetched.folder) != folder:
        raise ValueError(
            f"this machine ({platform.node()}) keeps {name} in {fetched.folder}, and the run began with {folder}: set "
            f"HF_HOME to the same folder on every machine"
        )


def _remote(place: Place) -> Remote:
    kinds: dict[str, Callable[[str], Remote]] = {
        "huggingface": FaceModel,
        "modelscope": ScopeModel,
        "url": StoredModel,
    }
    return kinds[place.kind](place.name)


class _Fetching:
    """One call of `fetch_model`."""

    def __init__(self, place: Place, remote: Remote, how: Fetch) -> None:
        self._place, self._remote, self._how = place, remote, how
        self._said_at = time.monotonic()

    def fetch(self) -> Fetched:
        kept = self._kept()
        wanted = self._place.revision
        if kept is not None and (kept.name == wanted.rpartition("/")[2] or self._is_offline):
            return self._fetched(kept, kept.name)
        if self._is_offline:
            raise Refused(self._not_here())
        try:
            listing = self._watched(partial(self._remote.list, wanted))
        except (Unreachable, TimeoutError) as error:
            if kept is None:
                raise Unreachable(f"{error}. {self._way_without_network()}") from error
            self._how.say(f"{error}; the copy of {self._place} in {kept} is used")
            return self._fetched(kept, kept.name)
        with taking_turns(self._remote, self._place.name, self._how.silence_s):
            folder = self._all_files(listing)
        if isinstance(self._remote, FaceModel):
            self._remote.note(wanted, listing)
        return self._fetched(folder, listing.revision)

    @property
    def _is_offline(self) -> bool:
        return self._how.offline or (isinstance(self._remote, FaceModel) and self._remote.is_offline)

    def _kept(self) -> Path | None:
        """The whole copy in the cache."""
        folder = self._remote.cached(self._place.revision)
        if folder is None or lacking(folder, weights=self._how.weights):
            return None
        if self._how.code and not self._is_offline and not any(folder.glob("*.py")):
            return None
        return folder

    def _not_here(self) -> str:
        folder = self._remote.cached(self._place.revision)
        why = "HF_HUB_OFFLINE" if not self._how.offline else "model.local_files_only"
        state = (
            f"the cache {self._remote.cache} has no copy of it"
            if folder is None
            else f"its copy {folder} lacks {lacking(folder, weights=self._how.weights)}"
        )
        return f"{state}, and {why} is set, so nobody is asked: fetch it once without, or name a folder"

    def _way_without_network(self) -> str:
        folder = self._remote.cached(self._place.revision)
        half = f" (half of it is in {folder} and is kept)" if folder is not None else ""
        return (
            f"Check the network and its proxy settings, or copy a model folder here and give that{half}; without a "
            f"network only what is in {self._remote.cache} can be used"
        )

    def _fetched(self, folder: Path, revision: str) -> Fetched:
        return Fetched(place=self._place, folder=str(folder), revision=revision)

    def _all_files(self, listing: Listing) -> Path:
        before = self._remote.cached(listing.revision)
        there = {path.relative_to(before).as_posix() for path in before.rglob("*")} if before else set()
        names = wanted_settings(listing.sizes, code=self._how.code)
        if self._how.weights and "config.json" not in names and "adapter_config.json" not in names:
            raise Refused(
                f"it has no config.json (it has {', '.join(sorted(listing.sizes)[:8]) or 'no files'})"
            )
        paths = {name: self._watched(partial(self._remote.get, listing, name)) for name in names}
        weights: list[str] = []
        if self._how.weights:
            try:
                index = read_json(paths[INDEX]) if INDEX in paths else None
                weights = wanted_weights(listing.sizes, index)
            except ValueError as error:
                raise Refused(str(error)) from error
        todo = [name for name in weights if name not in there]
        total = sum(listing.sizes[name] for name in todo)
        check_room(self._remote.cache, total)
        if todo:
            self._how.say(
                f"fetching {self._place} ({listing.revision[:12]}): {in_words(total)} into {self._remote.cache}"
            )
        base = self._remote.traffic()
        for name in todo:
            path = self._watched(
                partial(self._remote.get, listing, name), lambda now: self._show(now - base, total)
            )
            self._check(listing, name, path)
        if todo:
            self._how.say(f"fetched {self._place}: {len(names) + len(weights)} files")
        return self._remote.finish(listing)

    def _check(self, listing: Listing, name: str, path: Path) -> None:
        """Remove a file that is not what the hub says it is."""
        stated = listing.sha256.get(name)
        if stated is None:
            return
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != stated:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise Refused(
                f"{name} arrived with other contents (SHA-256 {found[:12]}, the hub says {stated[:12]}) and was "
                f"removed: try again; a proxy on the way may have changed it"
            )

    def _watched(self, work: Callable[[], T], show: Callable[[int], object] = lambda now: None) -> T:
        return while_heard(work, self._remote.traffic, self._how.silence_s, show=show)

    def _show(self, done: int, total: int) -> None:
        if time.monotonic() - self._said_at >= _SAY_EVERY_S[sys.stderr.isatty()]:
            self._said_at = time.monotonic()
            self._how.say(f"fetching {self._place}: {in_words(min(done, total))} of {in_words(total)}")


def _of_disk(error: OSError, remote: Remote) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {remote.cache} is full ({error.strerror}); make room there, or {remote.help}"
    return f"{remote.cache}: {error.strerror or error}; {remote.help}"
