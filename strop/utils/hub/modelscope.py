"""Models and data sets of ModelScope, through modelscope_hub (strop[modelscope]): retries, continued downloads and
hashes of files are its own.

The client tells no commit of a branch, so a state is named by the hashes of its files. Copies lie in `strop/` of the
client's cache folder, one folder for each state.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import logging
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from strop.utils.hub.model_files import STALE
from strop.utils.hub.repo import Listing, Refused, Repo, Sending, Unreachable, is_of_network, reason, size_of

STATE = "files-"
"""Beginning of the name of a state."""
MAIN = "master"
"""Name of the main branch at this hub."""


class ModelScopeRepo(Repo):
    """One model or data set of ModelScope. A copy of a data set is whole or absent."""

    help = "MODELSCOPE_CACHE names another folder"

    def __init__(self, name: str, kind: Literal["model", "dataset"] = "model") -> None:
        """Args:
        name: ORG/NAME.
        kind: of repository.

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
        _quiet_client()
        settings = client.HubConfig()  # of the environment as it is now
        self._api: Any = client.HubApi(settings)
        self._endpoint, self._name, self._kind = settings.endpoint, name, kind
        home = os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope"
        self.cache = Path(home).expanduser() / "strop"
        self._folder = self.cache / f"{'datasets--' * (kind == 'dataset')}{name.replace('/', '--')}"
        self._branch = ""

    def cached(self, revision: str) -> Path | None:
        """As of Repo; also of `BRANCH/STATE`."""
        last = revision.rpartition("/")[2]
        revision = last if last.startswith(STATE) else revision
        ref = self._folder / "refs" / (revision or MAIN)
        folder = self._folder / (ref.read_text(encoding="utf-8") if ref.is_file() else revision or "none")
        return folder if folder.is_dir() else None

    def list(self, revision: str) -> Listing:
        """As of Repo. `BRANCH/STATE`, or STATE for the main branch: refused unless it still has this state."""
        branch, _, state = revision.rpartition("/")
        self._branch = branch if state.startswith(STATE) else revision
        try:
            files = self._api.list_repo_files(self._name, self._kind, revision=self._branch or None)
        except Exception as error:
            raise self._convert_error(error) from error
        by_path = {file.path: file for file in files if not file.is_dir}
        digest = hashlib.sha256()
        for path, file in sorted(by_path.items()):
            digest.update(repr((path, file.size, file.sha256)).encode())
        listing = Listing(
            revision=f"{STATE}{digest.hexdigest()[:24]}",
            sizes={path: int(file.size or 0) for path, file in by_path.items()},
            sha256={path: file.sha256 for path, file in by_path.items() if file.sha256},
        )
        if state.startswith(STATE) and state != listing.revision:
            raise Refused(
                f"its {branch or 'main'} branch has other files by now ({listing.revision}), and "
                f"{self._folder / state}, which had them, is gone: put that folder back"
            )
        return listing

    def get(self, listing: Listing, names: Sequence[str]) -> Path:
        """As of Repo."""
        folder = self._folder / listing.revision
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):  # who comes meanwhile finds the files
            self._download(folder, listing, [name for name in names if not (folder / name).is_file()])
        ref = self._folder / "refs" / (self._branch or MAIN)
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(listing.revision, encoding="utf-8")
        return folder

    def _download(self, folder: Path, listing: Listing, names: Sequence[str]) -> None:
        """Download files into a folder; that of a data set appears when it has all of them. Files that are missing from
        one that is there are added to it."""
        if not names:
            return
        entries = [
            {"Path": name, "Size": listing.sizes[name], "Sha256": listing.sha256.get(name)} for name in names
        ]
        appears_whole = self._kind == "dataset" and not folder.is_dir()
        staging = folder.with_name(f"{folder.name}.part") if appears_whole else folder
        try:
            self._api.download_repo(
                self._name,
                self._kind,
                revision=self._branch or None,
                local_dir=staging,
                file_list=entries,
            )
        except Exception as error:
            raise self._convert_error(error) from error
        if staging != folder:
            staging.rename(folder)

    def traffic(self) -> int:
        """As of Repo."""
        return size_of(self._folder)

    def prepare(self, options: Sending) -> None:
        """As of Repo; the model is made where it does not exist, a branch is not."""
        try:
            self._api.whoami()
            if not self._api.repo_exists(self._name, "model"):
                self._api.create_repo(
                    self._name, "model", visibility="private" if options.private else "public"
                )
        except Exception as error:
            raise self._convert_error(error, verb="take") from error
        if options.branch:
            self.list(options.branch)

    def send(self, folder: Path, options: Sending) -> Listing:
        """As of Repo. Files of an earlier model go once those of the new one are there."""
        branch = options.branch or None
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints a report there
                self._api.upload_folder(
                    self._name, "model", folder, commit_message=options.message, revision=branch, use_cache=False,
                    disable_tqdm=True,
                )  # fmt: skip
            listing = self.list(options.branch)
            stale = [
                name
                for name in listing.sizes
                if any(fnmatchcase(name, pattern) for pattern in STALE) and not (folder / name).is_file()
            ]
            if not stale:
                return listing
            message = "Weights of the earlier model"
            self._api.delete_files(self._name, "model", stale, commit_message=message, revision=branch)
        except (Refused, Unreachable):
            raise
        except Exception as error:
            raise self._convert_error(error, verb="take") from error
        return self.list(options.branch)

    def _convert_error(self, error: Exception, *, verb: str = "give") -> Exception:
        """An error of the client as Refused or Unreachable, or one of this machine's disk. `verb`: the failed
        action of the hub."""
        errors = self._errors
        error = next(iter(getattr(error, "failed_files", {}).values()), error)
        if isinstance(error, errors.NotExistError):
            noun = "data set" if self._kind == "dataset" else "model"
            return Refused(
                f"there is no such {noun} or revision at ModelScope; check ORG/NAME and the revision"
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
        return Unreachable(f"{self._endpoint} does not {verb} it ({reason(below)})")


def _quiet_client() -> None:
    """Keep the client's bars out of logs, and its words on each attempt out of both."""
    logging.getLogger("modelscope_hub").setLevel(logging.ERROR)
    logging.getLogger("modelscope_hub.download").setLevel(logging.CRITICAL)
    download: Any = importlib.import_module("modelscope_hub._download")
    if hasattr(download, "tqdm"):
        download.tqdm = partial(importlib.import_module("tqdm").tqdm, disable=None)
