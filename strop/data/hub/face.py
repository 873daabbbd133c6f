"""Models of the Hugging Face hub, through its own client: cache, locks, tokens and continued downloads are its own."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from strop.data.cache import size_of
from strop.data.hub.remote import Listing, Refused, Unreachable, is_of_network
from strop.utils.field_types import nearest

ANSWER_S = 10.0
"""How long the hub may take to answer a question, in seconds."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


class FaceModel:
    """One model of the hub."""

    kind = "model"
    """What the client calls it."""
    noun = "model"
    """What sentences call it."""
    _place = ""
    help = "HF_HOME or HF_HUB_CACHE names another folder"

    def __init__(self, name: str) -> None:
        """Args:
        name: ORG/NAME.
        """
        self._hub: Any = importlib.import_module("huggingface_hub")  # heavy, and only some runs need it
        self._constants: Any = importlib.import_module("huggingface_hub.constants")
        self._errors: Any = importlib.import_module("huggingface_hub.errors")
        self._tools: Any = importlib.import_module("huggingface_hub.utils")
        self._tools.logging.set_verbosity_error()  # its errors become sentences here
        self._name = name
        self.cache = Path(self._constants.HF_HUB_CACHE)
        self._folder = self.cache / f"{self.kind}s--{name.replace('/', '--')}"

    @property
    def is_offline(self) -> bool:
        """The user has switched the hub off (HF_HUB_OFFLINE)."""
        return bool(self._constants.HF_HUB_OFFLINE)

    def cached(self, revision: str) -> Path | None:
        """As of Remote."""
        commit = revision or "main"
        if not _COMMIT.fullmatch(commit):
            commit = self.noted(commit)
        folder = self._folder / "snapshots" / commit
        return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None

    def list(self, revision: str) -> Listing:
        """As of Remote."""
        try:
            ask = getattr(self.api, f"{self.kind}_info")
            info = ask(self._name, revision=revision or None, files_metadata=True, timeout=ANSWER_S)
        except Exception as error:
            raise self.translated(error, revision) from error
        return Listing(
            revision=info.sha,
            sizes={file.rfilename: file.size or 0 for file in info.siblings},
            sha256={file.rfilename: file.lfs.sha256 for file in info.siblings if file.lfs is not None},
        )

    def get(self, listing: Listing, name: str) -> Path:
        """As of Remote."""
        try:
            found = self._hub.hf_hub_download(
                self._name,
                name,
                revision=listing.revision,
                endpoint=self._constants.ENDPOINT,
                tqdm_class=_silent_bar(self._tools),
            )
        except Exception as error:
            raise self.translated(error, listing.revision) from error
        return Path(found)

    def finish(self, listing: Listing) -> Path:
        """As of Remote."""
        return self._folder / "snapshots" / listing.revision

    def note(self, revision: str, listing: Listing) -> None:
        """Remember which commit a branch or tag stood for, as the client does, for the time without a network."""
        if not _COMMIT.fullmatch(revision):
            ref = self._folder / "refs" / (revision or "main")
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(listing.revision, encoding="utf-8")

    def noted(self, revision: str) -> str:
        """The commit that a branch or tag stood for when it was noted; empty where none was."""
        ref = self._folder / "refs" / (revision or "main")
        return ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""

    def traffic(self) -> int:
        """As of Remote."""
        return size_of(self._folder / "blobs")

    def translated(self, error: Exception, revision: str, *, verb: str = "read") -> Exception:
        """What an error of the client means: its kinds differ from version to version, so all are looked at.

        Args:
            error: of the client.
            revision: that was asked for.
            verb: what was tried: read or write.
        """
        errors, where = self._errors, self._constants.ENDPOINT
        chain = [error]
        while (below := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 10:
            chain.append(below)  # type: ignore[arg-type]
        for one in chain:
            if isinstance(one, errors.GatedRepoError):
                return Refused(
                    f"its owners ask for consent first: accept their conditions at "
                    f"{where}/{self._place}{self._name}, then set HF_TOKEN"
                    f" to a token of that account (`hf auth login` keeps one)"
                )
            if isinstance(one, errors.RepositoryNotFoundError):
                return Refused(
                    f"there is no such {self.noun} at {where}{self._near()}; a private one needs HF_TOKEN"
                )
            if isinstance(one, errors.RevisionNotFoundError):
                return Refused(f"it has no revision {revision!r}{self._near_revision(revision)}")
        for one in chain:
            status = getattr(getattr(one, "response", None), "status_code", None)
            if status in (401, 403):
                return Refused(f"{where} answers {status}: set HF_TOKEN to a token that may {verb} it")
            if status is not None and status < 500 and status != 429:
                return Refused(f"{where} answers {status}: {_first_line(one)}")
            if isinstance(one, OSError) and one.errno is not None and not is_of_network(one):
                return one  # of this machine's disk
        return Unreachable(f"{where} cannot be reached ({_first_line(chain[-1])})")

    @property
    def api(self) -> Any:
        """The client's own object, which asks the hub that is set now."""
        return self._hub.HfApi(endpoint=self._constants.ENDPOINT)

    def _near(self) -> str:
        """What has nearly this name, as a part of a sentence."""
        owner, _, name = self._name.rpartition("/")
        list_all = getattr(self.api, f"list_{self.kind}s")
        try:
            found = [one.id for one in list_all(search=name, limit=20)]
            found += [one.id for one in list_all(author=owner, limit=100)] if owner else []
        except Exception:  # noqa: BLE001  # the sentence is of use without a guess
            return ""
        near = nearest(self._name, found) or next(iter(found), None)
        return f"; the nearest is {near}" if near else ""

    def _near_revision(self, revision: str) -> str:
        try:
            refs = self.api.list_repo_refs(self._name, repo_type=self.kind)
        except Exception:  # noqa: BLE001  # as above
            return ""
        known = [ref.name for ref in (*refs.branches, *refs.tags)]
        near = nearest(revision, known)
        return f"; the nearest is {near}" if near else f"; it has {', '.join(known[:8])}" if known else ""


class FaceData(FaceModel):
    """One data set of the hub: which commit a name stands for; `datasets` reads its files."""

    kind = "dataset"
    noun = "data set"
    _place = "datasets/"


def _silent_bar(tools: Any) -> Any:
    """The client's bar of progress, drawing nothing: the caller shows how far all of it is."""

    class Silent(tools.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return Silent


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
