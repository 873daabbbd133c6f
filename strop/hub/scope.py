"""Models of ModelScope, through its own client (strop[modelscope])."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

from strop.hub.files import settle
from strop.hub.remote import Listing, Refused, Unreachable
from strop.hub.stores import reason
from strop.hub.waiting import size_of

STATE = "files-"
"""Begins the name of a state, which is made of the hashes of its files: the client tells no commit of a branch."""


class ScopeModel:
    """One model of ModelScope.

    Copies lie in `strop/` of the client's own cache folder, one folder for each state.
    """

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
        self._folder = self.cache / name.replace("/", "--")
        self._branch = ""

    def cached(self, revision: str) -> Path | None:
        """As of Remote."""
        ref = self._folder / "refs" / (revision or "master")
        state = ref.read_text(encoding="utf-8") if ref.is_file() else revision
        folder = self._folder / state if state else self._folder / "none"
        return folder if folder.is_dir() else None

    def list(self, revision: str) -> Listing:
        """As of Remote; the main branch must still have the state that `revision` may name."""
        self._branch = "" if revision.startswith(STATE) else revision
        try:
            files = self.api.list_repo_files(self._name, "model", revision=self._branch or None)
        except Exception as error:
            raise self.translated(error) from error
        found = {file.path: file for file in files if not file.is_dir}
        state = hashlib.sha256()
        for path, file in sorted(found.items()):
            state.update(repr((path, file.size, file.sha256)).encode())
        listing = Listing(
            revision=f"{STATE}{state.hexdigest()[:24]}",
            sizes={path: int(file.size or 0) for path, file in found.items()},
            sha256={path: file.sha256 for path, file in found.items() if file.sha256},
        )
        if revision.startswith(STATE) and revision != listing.revision:
            raise Refused(
                f"its main branch has other files by now ({listing.revision}), and {self._folder / revision}, which "
                f"had them, is gone: put that folder back"
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
                self._name, "model", name, revision=self._branch or None, local_dir=folder,
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
        ref = self._folder / "refs" / (self._branch or "master")
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(listing.revision, encoding="utf-8")
        return folder

    def traffic(self) -> int:
        """As of Remote."""
        return size_of(self._folder)

    def translated(self, error: Exception) -> Exception:
        """What an error of the client means."""
        errors = self._errors
        if isinstance(error, errors.NotExistError):
            return Refused(
                "there is no such model or revision at ModelScope; check ORG/NAME and the revision"
            )
        if isinstance(error, errors.AuthenticationError | errors.PermissionDeniedError):
            return Refused("ModelScope asks who you are: set MODELSCOPE_API_TOKEN to your token")
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            return error
        if isinstance(error, errors.FileIntegrityError):
            return Refused(f"{error.message}: try again; its files may have changed while they were fetched")
        below: BaseException = error
        for _ in range(10):
            below = below.__cause__ or below.__context__ or below
        return Unreachable(f"{self._where} does not give it ({reason(below)})")


def _be_silent() -> None:
    """The client draws a bar for each file and tells of each attempt: the caller says how far all of it is."""
    logging.getLogger("modelscope_hub").setLevel(logging.ERROR)
    download: Any = importlib.import_module("modelscope_hub._download")
    if hasattr(download, "tqdm"):
        download.tqdm = partial(importlib.import_module("tqdm").tqdm, disable=True)
