"""Models of ModelScope, through its own client (strop[modelscope])."""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any

from strop.hub.remote import Listing, Refused, Unreachable
from strop.hub.waiting import size_of


class ScopeModel:
    """One model of ModelScope. Its states have no hash that the client tells, so they are named by those of the files.

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
        self._api = client.HubApi()
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
        """As of Remote; `revision` may be the key of a state, which the main branch must still have."""
        is_key = (self._folder / revision).is_dir() if revision else False
        self._branch = "" if is_key else revision
        try:
            files = self._api.list_repo_files(self._name, "model", revision=self._branch or None)
        except Exception as error:
            raise self._translated(error) from error
        found = {file.path: file for file in files if not getattr(file, "is_dir", False)}
        state = hashlib.sha256()
        for path, file in sorted(found.items()):
            state.update(repr((path, file.size, file.sha256)).encode())
        return Listing(
            revision=state.hexdigest()[:40],
            sizes={path: int(file.size or 0) for path, file in found.items()},
            sha256={path: file.sha256 for path, file in found.items() if file.sha256},
        )

    def get(self, listing: Listing, name: str) -> Path:
        """As of Remote."""
        folder = self._folder / f"{listing.revision}.part"
        whole = self._folder / listing.revision / name
        if whole.is_file():
            return whole
        try:
            self._api.download_file(
                self._name, "model", name, revision=self._branch or None, local_dir=folder,
                expected_sha256=listing.sha256.get(name), file_size=listing.sizes[name],
            )  # fmt: skip
        except Exception as error:
            raise self._translated(error) from error
        return folder / name

    def finish(self, listing: Listing) -> Path:
        """As of Remote."""
        folder = self._folder / listing.revision
        if not folder.is_dir():
            (self._folder / f"{listing.revision}.part").rename(folder)
        ref = self._folder / "refs" / (self._branch or "master")
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(listing.revision, encoding="utf-8")
        return folder

    def traffic(self) -> int:
        """As of Remote."""
        return size_of(self._folder)

    def _translated(self, error: Exception) -> Exception:
        errors = self._errors
        if isinstance(error, errors.NotExistError):
            return Refused(
                "there is no such model or revision at ModelScope; check ORG/NAME and the revision"
            )
        if isinstance(error, errors.AuthenticationError | errors.PermissionDeniedError):
            return Refused("ModelScope asks who you are: set MODELSCOPE_API_TOKEN to your token")
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            return error
        lines = str(error).strip().splitlines()
        return Unreachable(
            f"ModelScope does not give it ({type(error).__name__}: {lines[0] if lines else ''})"
        )
