"""Checkpoint store: atomic saves, and the choice of the newest verified one.

A save begins, its files are written by any number of processes that see the folder, and it is sealed. It goes
through these names, each step after the one before has reached the disk:

    .saving-global_step_40/         files, then manifest.json
    global_step_40/                 by rename: from here on the checkpoint exists
    latest_checkpointed_iteration.txt

Only then are older checkpoints removed. A process that dies at any moment leaves the checkpoint before
untouched. A step that is saved again moves the earlier folder aside (`.replaced-global_step_40`) for the
moment of the rename; if the process dies just there, the folder set aside is still found.

Concurrency: one process uses a store, and one save is in flight at a time. Files come from any processes. Sealing reads
every byte twice, and may be done by another thread than the one that goes on.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.run.manifest import (
    Checkpoint,
    CheckpointError,
    Manifest,
    check_files,
    jsonable,
    read_manifest,
    seal,
)
from strop.utils.atomic_io import replace_text, sync_folder

LATEST = "latest_checkpointed_iteration.txt"
"""Holds the step of the newest checkpoint, for people and scripts; `latest_valid` does not trust it."""

MODEL_FOLDER = "model"
"""Folder of a checkpoint with the policy as an ordinary Hugging Face model, where it has one."""
_NAME = re.compile(r"(?P<state>\.saving-|\.replaced-)?global_step_(?P<step>\d{1,18})", re.ASCII)
_SAVING, _REPLACED = ".saving-", ".replaced-"
# How libraries written in Rust (safetensors), and errors that came from another process, name an errno.
_OS_ERROR_IN_TEXT = re.compile(r"(?:os error |\[Errno )(\d+)")
_OF_DISKS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, errno.ESTALE}
)
_FULL_DISK_BYTES = 2**20  # less free space than this after a failed write means that the disk is full


@dataclass(frozen=True)
class _Candidate:
    step: int
    path: Path
    state: str
    """"" in its place, or one of the two prefixes."""


class CheckpointStore:
    """Checkpoints of one run, in one folder, written by one process.

    Args:
        root: the folder; it is made by the first save.
        keep_last: newest checkpoints that stay, at least 1.
        keep_best: checkpoints with the highest score that stay besides.
    """

    def __init__(self, root: Path, *, keep_last: int, keep_best: int) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last is {keep_last} and keep_best is {keep_best}; at least 1 and 0 are needed, so "
                f"that the newest checkpoint always stays"
            )
        self.root = root
        self.keep_last = keep_last
        self.keep_best = keep_best
        self._in_flight: PendingCheckpoint | None = None

    def begin(self, step: int, *, score: float | None = None, facts: Mapping[str, Any]) -> PendingCheckpoint:
        """Begin a checkpoint: files go into its `folder`, then it is sealed.

        Args:
            step: training steps done.
            score: higher is better; None or a value that is not finite takes no part in `keep_best`.
            facts: plain values for the manifest, as they are now.

        Raises:
            CheckpointError: the disk refused; the message names the checkpoint that stays valid.
            RuntimeError: the one before is not sealed.
        """
        plain_facts = jsonable(facts, "facts")
        known_score = float(score) if score is not None and math.isfinite(score) else None
        if self._in_flight is not None and not self._in_flight.is_over:
            raise RuntimeError(f"checkpoint {self._in_flight.step} was begun, and is not sealed")
        pending = PendingCheckpoint(self, step, score=known_score, facts=plain_facts)
        with self._removed_on_error(pending):
            self.root.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            pending.folder.mkdir()
        self._in_flight = pending
        return pending

    def latest_valid(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint with every byte as it was written, and a sentence per newer one skipped."""
        skipped: list[str] = []
        chosen: Checkpoint | None = None
        for candidate in self._candidates():
            name = f"ckpt {candidate.step}"
            if candidate.state == _SAVING:
                skipped.append(f"{name} {_unfinished_reason(candidate.path)}")
                continue
            try:
                chosen = self._verified(candidate)
            except CheckpointError as error:
                skipped.append(f"{name} {error}")
                continue
            break
        outcome = f"using {chosen.step}" if chosen else "no earlier checkpoint is valid"
        return chosen, [f"{reason} - {outcome}" for reason in skipped]

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of one step, verified.

        Raises:
            CheckpointError: there is none, or it is damaged; the message lists the others.
        """
        other_steps = [other_step for other_step in self.steps() if other_step != step]
        have = (
            f"checkpoints: {', '.join(map(str, other_steps))}"
            if other_steps
            else "there is no other checkpoint"
        )
        reasons = []
        for candidate in self._candidates():
            if candidate.step == step and candidate.state != _SAVING:
                try:
                    return self._verified(candidate)
                except CheckpointError as error:
                    reasons.append(str(error))
        raise CheckpointError(f"ckpt {step} {reasons[0] if reasons else f'is not in {self.root}'}; {have}")

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are complete by name and size, in order; hashes are not read."""
        return sorted({candidate.step for candidate, _ in self._complete()})

    def best(self) -> tuple[int, float] | None:
        """Step and score of the complete checkpoint with the highest score, of equal ones the latest; None where none
        has a score."""
        scored = [
            (manifest.score, candidate.step)
            for candidate, manifest in self._complete()
            if manifest.score is not None
        ]
        if not scored:
            return None
        score, step = max(scored)
        return step, score

    def discard_after(self, step: int) -> None:
        """Remove the valid checkpoints of later steps, because the run continues from `step`.

        Otherwise a later crash would resume in a future that was given up. Damaged ones are never chosen;
        the next save removes them.

        Raises:
            CheckpointError: nothing valid would be left.
        """
        later = [candidate for candidate, _ in self._complete() if candidate.step > step]
        later = [candidate for candidate in later if self._is_valid(candidate)]
        if not later:
            return
        try:
            self.at(step)
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot continue from step {step}, because {error}; continue from one of those, or start a "
                f"run of its own with --out"
            ) from error
        for candidate in later:
            self._remove(candidate.path)

    @contextlib.contextmanager
    def _removed_on_error(self, pending: PendingCheckpoint) -> Iterator[None]:
        """Remove the written files on an error; an error of the disk becomes a CheckpointError."""
        try:
            yield
        except Exception as error:
            reason = self._disk_reason(error)
            shutil.rmtree(pending.folder, ignore_errors=True)
            if reason is None:
                raise
            raise CheckpointError(
                f"checkpoint {pending.step} could not be saved to {self.root}: {reason}; {self._fallback_text()}. Free "
                f"space or check the disk, then continue with --resume."
            ) from error
        except BaseException:
            shutil.rmtree(pending.folder, ignore_errors=True)
            raise

    def _seal(self, pending: PendingCheckpoint) -> Checkpoint:
        """Manifest, rename, verification, and only then retention."""
        final = self.root / f"global_step_{pending.step}"
        with self._removed_on_error(pending):
            manifest = seal(pending.folder, step=pending.step, score=pending.score, facts=pending.facts)
            self._put_in_place(pending.folder, final)
            self._verify_saved(final, manifest)
            replace_text(self.root / LATEST, f"{pending.step}\n")
        checkpoint = Checkpoint(pending.step, final, manifest)
        self._retain(checkpoint)
        return checkpoint

    def _candidates(self) -> list[_Candidate]:
        """All folders with the name of a checkpoint, newest first; of one step, the one in place first."""
        try:
            paths = list(self.root.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot read the checkpoints in {self.root}: {error.strerror}") from error
        candidates = []
        for path in paths:
            match = _NAME.fullmatch(path.name)
            # A link could lead to the checkpoint of another run, which retention would then remove.
            if match and path.is_dir() and not path.is_symlink():
                candidates.append(_Candidate(int(match["step"]), path, match["state"] or ""))
        return sorted(
            candidates,
            key=lambda candidate: (-candidate.step, ["", _REPLACED, _SAVING].index(candidate.state)),
        )

    def _complete(self) -> list[tuple[_Candidate, Manifest]]:
        """Candidates with a sound manifest and files of the right sizes, newest first."""
        complete = []
        for candidate in self._candidates():
            if candidate.state == _SAVING:
                continue
            try:
                manifest = read_manifest(candidate.path)
                check_files(candidate.path, manifest, hashes=False)
            except CheckpointError:
                continue
            complete.append((candidate, manifest))
        return complete

    def _verified(self, candidate: _Candidate) -> Checkpoint:
        manifest = read_manifest(candidate.path)
        if manifest.step != candidate.step:
            raise CheckpointError(f"holds the checkpoint of step {manifest.step} (the folder was renamed)")
        check_files(candidate.path, manifest, hashes=True)
        return Checkpoint(candidate.step, candidate.path, manifest)

    def _is_valid(self, candidate: _Candidate) -> bool:
        try:
            self._verified(candidate)
        except CheckpointError:
            return False
        return True

    def _clear_leftovers(self) -> None:
        """Remove the rests of saves that did not end; a folder set aside returns if it is the better one."""
        for candidate in self._candidates():
            if candidate.state == _SAVING:
                self._remove(candidate.path)
            elif candidate.state == _REPLACED:
                final = self.root / f"global_step_{candidate.step}"
                in_place = _Candidate(candidate.step, final, "")
                if not self._is_valid(in_place) and self._is_valid(candidate):
                    shutil.rmtree(final, ignore_errors=True)
                    candidate.path.rename(final)
                else:
                    self._remove(candidate.path)

    def _put_in_place(self, saving: Path, final: Path) -> None:
        aside = self.root / (_REPLACED + final.name)
        if final.exists():
            final.rename(aside)
        try:
            saving.rename(final)
        except OSError:
            if aside.exists():
                aside.rename(final)
            raise
        sync_folder(self.root)

    def _verify_saved(self, final: Path, manifest: Manifest) -> None:
        _drop_from_cache(final, manifest)
        try:
            check_files(final, read_manifest(final), hashes=True)
        except CheckpointError as error:
            shutil.rmtree(final, ignore_errors=True)
            aside = self.root / (_REPLACED + final.name)
            if aside.exists():
                aside.rename(final)
            reason = f"what was read back {error}: the disk or the memory is faulty"
            raise OSError(errno.EIO, reason) from error

    def _retain(self, newest: Checkpoint) -> None:
        """Remove the checkpoints beyond retention. `newest` was verified, so something valid always stays."""
        complete = [
            (candidate, manifest) for candidate, manifest in self._complete() if candidate.step <= newest.step
        ]
        in_place = [(candidate, manifest) for candidate, manifest in complete if candidate.state == ""]
        scored = [
            (manifest.score, candidate.step) for candidate, manifest in in_place if manifest.score is not None
        ]
        kept_steps = {candidate.step for candidate, _ in in_place[: self.keep_last]}
        kept_steps |= {step for _, step in sorted(scored, reverse=True)[: self.keep_best]}
        kept_steps.add(newest.step)
        keepers = {candidate.path for candidate, _ in in_place if candidate.step in kept_steps}
        for candidate in self._candidates():
            if candidate.path not in keepers:
                self._remove(candidate.path)

    def _remove(self, path: Path) -> None:
        """Remove a folder, manifest first: a crash in between leaves nothing that looks complete."""
        (path / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def _fallback_text(self) -> str:
        chosen, _ = self.latest_valid()
        return f"checkpoint {chosen.step} stays valid" if chosen else "there is no earlier valid checkpoint"

    def _disk_reason(self, error: Exception) -> str | None:
        """Error text of the operating system, also from within a library's error; else None."""
        if isinstance(error, OSError):
            return error.strerror or str(error)
        match = _OS_ERROR_IN_TEXT.search(str(error))
        if match and int(match[1]) in _OF_DISKS:
            return os.strerror(int(match[1]))
        if self.root.is_dir() and shutil.disk_usage(self.root).free < _FULL_DISK_BYTES:
            return os.strerror(errno.ENOSPC)
        return None


class PendingCheckpoint:
    """A checkpoint between its beginning and its manifest: `CheckpointStore.begin` makes it.

    Write into `folder`, from any process, within `writing`; then call `seal`.
    Nothing here looks at the files before they are all written.
    """

    def __init__(
        self, store: CheckpointStore, step: int, *, score: float | None, facts: Mapping[str, Any]
    ) -> None:
        """Args:
        store: it belongs to.
        step, score, facts: of the manifest.
        """
        self.step, self.score, self.facts = step, score, facts
        self.folder = store.root / f"{_SAVING}global_step_{step}"
        """Folder of the files; subfolders are fine."""
        self._store = store
        self._is_closed = False
        self.is_over = False
        """Sealed, or failed."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Context for writing into `folder`: on an error the checkpoint is given up, and nothing is left of it.

        Raises:
            CheckpointError: the disk refused; the message names the checkpoint that stays valid. Other errors of
                a writer pass through.
        """
        self._check_open()
        try:
            with self._store._removed_on_error(self):
                yield
        except BaseException:
            self.is_over = True
            raise

    def seal(self) -> Checkpoint:
        """Make the files a checkpoint: every writer is done. Retention then removes older ones.

        Raises:
            CheckpointError: the disk refused, or does not give back what was written; the message names the
                checkpoint that stays valid. Nothing is left of the failed save.
        """
        self._check_open()
        self._is_closed = True
        try:
            return self._store._seal(self)
        finally:
            self.is_over = True

    def _check_open(self) -> None:
        if self.is_over or self._is_closed:
            raise RuntimeError(f"checkpoint {self.step} is being sealed, was sealed, or has failed")


def _unfinished_reason(saving: Path) -> str:
    if (saving / "manifest.json").exists():
        return "was not yet in its place (crash during save)"
    return "has no manifest (crash during save)"


def _drop_from_cache(folder: Path, manifest: Manifest) -> None:
    """Ask the kernel to forget the pages, so that the check reads the disk and not the page cache."""
    if not hasattr(os, "posix_fadvise"):  # not on every system; the check then reads the cache
        return
    for name in manifest.files:
        with (folder / name).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
