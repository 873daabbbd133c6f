"""Models and data sets of the Hugging Face hub, through huggingface_hub: cache, locks, tokens, retries and continued
downloads are its own."""

from __future__ import annotations

import glob
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from strop.utils.atomic_io import sha256_of_file
from strop.utils.field_types import nearest
from strop.utils.hub.model_files import STALE
from strop.utils.hub.repo import Listing, Refused, Repo, Sending, Unreachable, is_of_network, reason, size_of

ANSWER_S = 10.0
"""Deadline of an answer of the hub, in seconds."""
COMMIT = re.compile(r"[0-9a-f]{40}")
"""Name of a commit."""


class HuggingFaceRepo(Repo):
    """One model or data set of the hub."""

    help = "HF_HOME or HF_HUB_CACHE names another folder"

    def __init__(self, name: str, kind: Literal["model", "dataset"] = "model") -> None:
        """Args:
        name: ORG/NAME.
        kind: of repository.
        """
        self._hub: Any = importlib.import_module("huggingface_hub")  # heavy, and only some runs need it
        self._constants: Any = importlib.import_module("huggingface_hub.constants")
        self._errors: Any = importlib.import_module("huggingface_hub.errors")
        tools: Any = importlib.import_module("huggingface_hub.utils")
        tools.logging.set_verbosity_error()  # errors become sentences here
        if not sys.stderr.isatty():
            tools.disable_progress_bars()  # they would be lines of a log
        self._name, self._kind = name, kind
        self.is_offline = bool(self._constants.HF_HUB_OFFLINE)
        self.cache = Path(self._constants.HF_HUB_CACHE)
        self._folder = self.cache / f"{kind}s--{name.replace('/', '--')}"
        self._api: Any = self._hub.HfApi(endpoint=self._constants.ENDPOINT)

    def cached(self, revision: str) -> Path | None:
        """As of Repo."""
        commit = revision if COMMIT.fullmatch(revision) else self.stored_commit(revision)
        folder = self._folder / "snapshots" / commit
        return folder if commit and folder.is_dir() else None

    def list(self, revision: str) -> Listing:
        """As of Repo."""
        try:
            info = self._api.repo_info(
                self._name,
                repo_type=self._kind,
                revision=revision or None,
                files_metadata=True,
                timeout=ANSWER_S,
            )
        except Exception as error:
            raise self._convert_error(error, revision) from error
        return Listing(
            revision=info.sha,
            sizes={file.rfilename: file.size or 0 for file in info.siblings},
            sha256={file.rfilename: file.lfs.sha256 for file in info.siblings if file.lfs is not None},
        )

    def get(self, listing: Listing, names: Sequence[str]) -> Path:
        """As of Repo; a file that is not what the hub says it is leaves the cache."""
        folder = self._folder / "snapshots" / listing.revision
        lacking = [name for name in names if not (folder / name).is_file()]
        if not lacking:
            return folder
        try:
            self._hub.snapshot_download(
                self._name, repo_type=self._kind, revision=listing.revision, endpoint=self._constants.ENDPOINT,
                allow_patterns=list(map(glob.escape, lacking)),
            )  # fmt: skip
        except Exception as error:
            raise self._convert_error(error, listing.revision) from error
        for name in lacking:
            _check_hash(folder / name, name, listing.sha256.get(name))
        return folder

    def store_commit(self, revision: str, listing: Listing) -> None:
        """Store the commit of a branch or tag, as the client does, for use without a network."""
        if not COMMIT.fullmatch(revision):
            ref = self._folder / "refs" / (revision or "main")
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(listing.revision, encoding="utf-8")

    def stored_commit(self, revision: str) -> str:
        """The stored commit of a branch or tag; empty where there is none."""
        ref = self._folder / "refs" / (revision or "main")
        return ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""

    def traffic(self) -> int:
        """As of Repo."""
        return size_of(self._folder / "blobs")

    def prepare(self, options: Sending) -> None:
        """As of Repo; the model is made where it does not exist."""
        if self.is_offline:
            raise Refused("HF_HUB_OFFLINE is set, so nobody is asked: unset it")
        try:
            self._api.create_repo(self._name, private=options.private or None, exist_ok=True)
        except Exception as error:
            raise self._convert_error(error, options.branch, verb="write") from error

    def send(self, folder: Path, options: Sending) -> Listing:
        """As of Repo; all files are one commit, with which weights of an earlier model leave."""
        try:
            commit = self._api.upload_folder(
                repo_id=self._name, folder_path=folder, commit_message=options.message, revision=options.branch or None,
                delete_patterns=list(STALE),
            )  # fmt: skip
        except Exception as error:
            raise self._convert_error(error, options.branch, verb="write") from error
        return self.list(commit.oid)

    def _convert_error(self, error: Exception, revision: str, *, verb: str = "read") -> Exception:
        """An error of the client as Refused or Unreachable, or one of this machine's disk: its kinds differ from
        version to version, so all are looked at."""
        errors, endpoint = self._errors, self._constants.ENDPOINT
        chain: list[Any] = [error]
        while (below := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 10:
            chain.append(below)
        section, noun = ("datasets/", "data set") if self._kind == "dataset" else ("", "model")
        for link in chain:
            if isinstance(link, errors.HFValidationError):
                return Refused(f"{self._name!r} is no name of the hub, which are ORG/NAME ({reason(link)})")
            if isinstance(link, errors.GatedRepoError):
                return Refused(
                    f"its owners ask for consent first: accept their conditions at {endpoint}/{section}{self._name}, "
                    f"then set HF_TOKEN to a token of that account (`hf auth login` keeps one)"
                )
            if isinstance(link, errors.RepositoryNotFoundError):
                return Refused(
                    f"there is no such {noun} at {endpoint}{self._near()}; a private one needs HF_TOKEN"
                )
            if isinstance(link, errors.RevisionNotFoundError):
                return Refused(f"it has no revision {revision!r}{self._near_revision(revision)}")
        for link in chain:
            status = getattr(getattr(link, "response", None), "status_code", None)
            if status in (401, 403):
                return Refused(f"{endpoint} answers {status}: set HF_TOKEN to a token that may {verb} it")
            if status is not None and status < 500 and status != 429:
                return Refused(f"{endpoint} answers {status}: {reason(link)}")
            if isinstance(link, OSError) and link.errno is not None and not is_of_network(link):
                return link
        return Unreachable(f"{endpoint} cannot be reached ({reason(chain[-1])})")

    def _near(self) -> str:
        """The repository with nearly this name, as a part of a sentence."""
        owner, _, name = self._name.rpartition("/")
        list_all = getattr(self._api, f"list_{self._kind}s")
        try:
            ids = [repo.id for repo in list_all(search=name, limit=20)]
            ids += [repo.id for repo in list_all(author=owner, limit=100)] if owner else []
        except Exception:  # noqa: BLE001  # the sentence is of use without a guess
            return ""
        near = nearest(self._name, ids) or next(iter(ids), None)
        return f"; the nearest is {near}" if near else ""

    def _near_revision(self, revision: str) -> str:
        try:
            refs = self._api.list_repo_refs(self._name, repo_type=self._kind)
        except Exception:  # noqa: BLE001  # as above
            return ""
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
        near = nearest(revision, names)
        return f"; the nearest is {near}" if near else f"; it has {', '.join(names[:8])}" if names else ""


def _check_hash(path: Path, name: str, stated: str | None) -> None:
    """Remove a file whose contents have another hash than is stated."""
    if stated is None:
        return
    if (digest := sha256_of_file(path)) != stated:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise Refused(
            f"{name} arrived with other contents (SHA-256 {digest[:12]}, the hub says {stated[:12]}) and was "
            f"removed: try again; a proxy on the way may have changed it"
        )
