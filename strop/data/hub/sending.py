"""A folder of this machine to a hub or a store: the one function that commands call.

What was sent is then listed there and compared: sizes everywhere, and the hashes that a hub states.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from strop.data.hub.face import FaceModel
from strop.data.hub.places import Place, place_of
from strop.data.hub.remote import Listing, Refused, Unreachable
from strop.data.hub.scope import ScopeModel, overhearing
from strop.data.hub.transfer import check_empty, put_folder

_STALE = ("*.safetensors", "*.safetensors.index.json")
"""Files of an earlier model at a hub that would be read beside or in place of those of the new one."""


@dataclass(frozen=True, kw_only=True)
class Sending:
    """How a folder is sent."""

    say: Callable[[str], object] = lambda line: None
    private: bool = False
    """Where a hub has no such model yet: make it one that others do not see."""
    branch: str = ""
    """Of a hub, which must be there; empty: the main one."""
    message: str = "Upload a model with strop"
    """Of the commit, at a hub."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A folder that lies elsewhere now."""

    place: Place
    revision: str
    """The commit at a hub, where it tells one; else empty."""
    num_files: int
    num_bytes: int


def _is_stale(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _STALE)


@dataclass
class Destination(ABC):
    """Where a folder is sent to."""

    place: Place
    how: Sending
    key: str
    """What it was given as, for sentences."""

    @abstractmethod
    def prepare(self) -> None:
        """Find out, before a model is made, that it will be taken.

        Raises:
            Refused, Unreachable: it will not.
        """

    @abstractmethod
    def _send(self, folder: Path) -> Listing:
        """Send all files of a folder; what is there now.

        Raises:
            Refused, Unreachable: it cannot be sent.
        """

    def send(self, folder: Path) -> Sent:
        """Send all files of a folder and compare what is there with them.

        Raises:
            ValueError: it cannot be sent, or something else arrived.
        """
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        total = sum(sizes.values())
        self.how.say(f"sending {len(sizes)} files, {total / 2**20:.1f} MiB, to {self.place}")
        try:
            there = self._send(folder)
        except (Refused, Unreachable, TimeoutError) as error:
            raise ValueError(f"{self.key} {str(self.place)!r}: {error}") from error
        for name, size in sizes.items():
            self._compare(folder / name, name, size, there)
        return Sent(place=self.place, revision=there.revision, num_files=len(sizes), num_bytes=total)

    def _compare(self, path: Path, name: str, size: int, there: Listing) -> None:
        stated = there.sha256.get(name)
        is_same = there.sizes.get(name) == size
        if is_same and stated is not None:
            with path.open("rb") as file:
                is_same = hashlib.file_digest(file, "sha256").hexdigest() == stated
        if not is_same:
            found = f"has {there.sizes[name]} bytes of {size}" if name in there.sizes else "is not there"
            raise ValueError(
                f"{self.key} {str(self.place)!r}: {name} was sent, and {found} or other contents: send it again"
            )


def destination(text: str, how: Sending, *, key: str = "--to") -> Destination:
    """Where a name leads, found ready to take a folder.

    Args:
        text: ORG/NAME, modelscope:ORG/NAME or a URL.
        how: as it is sent.
        key: what `text` was given as, for sentences.

    Raises:
        ValueError: it leads nowhere, or it takes nothing from us: the sentence says why, and what to do.
    """
    place = place_of(text, key)
    if place.is_here:
        raise ValueError(
            f"{key} {text!r} is a folder of this machine: `strop export RUN --out DIR` writes one"
        )
    if place.kind == "url" and how.branch:
        raise ValueError(f"a branch ({how.branch}) is given beside {key} {text!r}, a URL, which has none")
    if place.revision:
        raise ValueError(f"{key} {text!r} names a revision; name the branch that takes it with --branch")
    kinds: dict[str, type[Destination]] = {"huggingface": _Face, "modelscope": _Scope, "url": _Store}
    try:
        found = kinds[place.kind](place, how, key)
        found.prepare()
    except (Refused, Unreachable) as error:
        raise ValueError(f"{key} {str(place)!r} takes nothing: {error}") from error
    return found


@dataclass
class _Face(Destination):
    """A model of the Hugging Face hub, through its own client: it commits all files at once."""

    model: FaceModel = field(init=False)

    def __post_init__(self) -> None:
        self.model = FaceModel(self.place.name)

    def prepare(self) -> None:
        """As of Destination."""
        if self.model.is_offline:
            raise Refused("HF_HUB_OFFLINE is set, so nobody is asked: unset it")
        try:
            self.model.api.create_repo(self.place.name, private=self.how.private or None, exist_ok=True)
        except Exception as error:
            raise self.model.translated(error, self.how.branch, verb="write") from error

    def _send(self, folder: Path) -> Listing:
        """As of Destination."""
        try:
            commit = self.model.api.upload_folder(
                repo_id=self.place.name,
                folder_path=folder,
                commit_message=self.how.message,
                revision=self.how.branch or None,
                delete_patterns=list(_STALE),
            )
        except Exception as error:
            raise self.model.translated(error, self.how.branch, verb="write") from error
        return self.model.list(commit.oid)


@dataclass
class _Scope(Destination):
    """A model of ModelScope, through its own client."""

    model: ScopeModel = field(init=False)

    def __post_init__(self) -> None:
        self.model = ScopeModel(self.place.name)

    def prepare(self) -> None:
        """As of Destination."""
        try:
            self.model.api.whoami()
            if not self.model.api.repo_exists(self.place.name, "model"):
                visibility = "private" if self.how.private else "public"
                self.model.api.create_repo(self.place.name, "model", visibility=visibility)
        except Exception as error:
            raise self.model.translated(error, verb="take") from error
        if self.how.branch:
            self.model.list(self.how.branch)  # it is not made

    def _send(self, folder: Path) -> Listing:
        """As of Destination. Files of an earlier model go once those of the new one are there."""
        branch, told = self.how.branch or None, list[str]()
        try:
            with overhearing(told), contextlib.redirect_stdout(io.StringIO()):  # it prints a report there
                self.model.api.upload_folder(
                    self.place.name, "model", folder, commit_message=self.how.message, revision=branch,
                    use_cache=False, disable_tqdm=True,
                )  # fmt: skip
            there = self.model.list(self.how.branch)
            stale = [name for name in there.sizes if _is_stale(name) and not (folder / name).is_file()]
            if not stale:
                return there
            self.model.api.delete_files(
                self.place.name,
                "model",
                stale,
                commit_message="Weights of the earlier model",
                revision=branch,
            )
        except (Refused, Unreachable):
            raise
        except Exception as error:
            raise self.model.translated(error, verb="take", told=told) from error
        return self.model.list(self.how.branch)


@dataclass
class _Store(Destination):
    """A folder at a URL of any kind that fsspec can write."""

    def prepare(self) -> None:
        """As of Destination."""
        check_empty(self.place.name)

    def _send(self, folder: Path) -> Listing:
        """As of Destination."""
        sizes = put_folder(folder, self.place.name, say=self.how.say)
        return Listing(revision="", sizes=sizes, sha256={})
