"""Models and data sets of ModelScope, through its own client (strop[modelscope])."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from strop.data.cache import size_of
from strop.data.hub.files import settle
from strop.data.hub.remote import Listing, Refused, Unreachable, is_of_network
from strop.data.hub.stores import reason

STATE = "files-"
"""Begins the name of a state, which is made of the hashes of its files: the client tells no commit of a branch."""

MAIN = "master"
"""What the hub calls the main branch."""


class ScopeModel:
    """One model of ModelScope.

    Copies lie in `strop/` of the client's own cache folder, one folder for each state.
    """

    kind = "model"
    """What the client calls it."""
    noun = "model"
    """What sentences call it."""
    _place = ""
    help = "MODELSCOPE_CACHE names another folder"

    def __init__(self, name: str) -> None:
        """Args:
        name: ORG/NAME.

        Raises:
            Refused: the client is not installed.
        """
        try:
            client: Any = importlib.import_module("modelscope_hub")
        except ImportError as error:
            raise Refused(
                "the client of ModelScope is not installed: pip install 'strop[modelscope]'"
            ) from error
        self._errors: Any = importlib.import_module("modelscope_hub.errors")
        _be_silent()
        settings = client.HubConfig()  # of the environment as it is now
        self.api: Any = client.HubApi(settings)
        self._where = settings.endpoint
        self._name = name
        home = os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope"
        self.cache = Path(home).expanduser() / "strop"
        self._folder = self.cache / f"{self._place}{name.replace('/', '--')}"
        self._branch = ""

    def cached(self, revision: str) -> Path | None:
        """As of Remote; also of `BRANCH/STATE`."""
        last = revision.rpartition("/")[2]
        revision = last if last.startswith(STATE) else revision
        ref = self._folder / "refs" / (revision or MAIN)
        state = ref.read_text(encoding="utf-8") if ref.is_file() else revision
        folder = self._folder / state if state else self._folder / "none"
        return folder if folder.is_dir() else None

    def list(self, revision: str) -> Listing:
        """As of Remote. `BRANCH/STATE`, or STATE for the main branch: what must still have this state."""
        branch, _, state = revision.rpartition("/")
        self._branch = branch if state.startswith(STATE) else revision
        try:
            files = self.api.list_repo_files(self._name, self.kind, revision=self._branch or None)
        except Exception as error:
            raise self.translated(error) from error
        found = {file.path: file for file in files if not file.is_dir}
        digest = hashlib.sha256()
        for path, file in sorted(found.items()):
            digest.update(repr((path, file.size, file.sha256)).encode())
        listing = Listing(
            revision=f"{STATE}{digest.hexdigest()[:24]}",
            sizes={path: int(file.size or 0) for path, file in found.items()},
            sha256={path: file.sha256 for path, file in found.items() if file.sha256},
        )
        if state.startswith(STATE) and state != listing.revision:
            raise Refused(
                f"its {branch or 'main'} branch has other files by now ({listing.revision}), and "
                f"{self._folder / state}, which had them, is gone: put that folder back"
            )
        return listing

    def get(self, listing: Listing, name: str) -> Path:
        """As of Remote."""
        folder = self._folder / f"{listing.revision}.part"
        whole = self._folder / listing.revision / name
        if whole.is_file():
            return whole
        try:
            self.api.download_file(
                self._name, self.kind, name, revision=self._branch or None, local_dir=folder,
                expected_sha256=listing.sha256.get(name), file_size=listing.sizes[name],
            )  # fmt: skip
        except Exception as error:
            raise self.translated(error) from error
        return folder / name

    def finish(self, listing: Listing) -> Path:
        """As of Remote."""
        folder, staging = self._folder / listing.revision, self._folder / f"{listing.revision}.part"
        if staging.is_dir():
            settle(staging, folder)
        ref = self._folder / "refs" / (self._branch or MAIN)
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(listing.revision, encoding="utf-8")
        return folder

    def traffic(self) -> int:
        """As of Remote."""
        return size_of(self._folder)

    def translated(self, error: Exception, *, verb: str = "give", told: Sequence[str] = ()) -> Exception:
        """What an error of the client means.

        Args:
            error: of the client.
            verb: what was asked of the hub: give or take.
            told: what the client had logged by then; of a folder its error says only how many files failed.
        """
        errors = self._errors
        if isinstance(error, errors.NotExistError):
            return Refused(
                f"there is no such {self.noun} or revision at ModelScope; check ORG/NAME and the revision"
            )
        if isinstance(error, errors.AuthenticationError | errors.PermissionDeniedError):
            return Refused("ModelScope asks who you are: set MODELSCOPE_API_TOKEN to your token")
        if isinstance(error, OSError) and error.errno is not None and not is_of_network(error):
            return error
        if isinstance(error, errors.FileIntegrityError):
            return Refused(f"{error.message}: try again; its files may have changed while they were fetched")
        below: BaseException = error
        for _ in range(10):
            below = below.__cause__ or below.__context__ or below
        why = "; ".join([*told[:1], reason(below)])
        return Unreachable(f"{self._where} does not {verb} it ({why})")


class ScopeData(ScopeModel):
    """One data set of ModelScope. A copy is whole or absent, so all of its files are fetched."""

    kind = "dataset"
    noun = "data set"
    _place = "datasets--"


@contextlib.contextmanager
def overhearing(told: list[str]) -> Iterator[None]:
    """While this lasts, the first lines of what the client logs when it sends go into a list, not to the terminal."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage().partition("\n")[0])

    own = logging.getLogger("modelscope_hub.upload")
    listener, propagates = Listener(logging.ERROR), own.propagate
    own.addHandler(listener)
    own.propagate = False
    try:
        yield
    finally:
        own.removeHandler(listener)
        own.propagate = propagates


def _be_silent() -> None:
    """The client draws a bar for each file and tells of each attempt: the caller says how far all of it is."""
    logging.getLogger("modelscope_hub").setLevel(logging.ERROR)
    download: Any = importlib.import_module("modelscope_hub._download")
    if hasattr(download, "tqdm"):
        download.tqdm = partial(importlib.import_module("tqdm").tqdm, disable=True)
