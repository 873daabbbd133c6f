"""A checkpoint between its beginning and its manifest.

Concurrency: the process with the store owns it; `seal_after` starts the one thread that seals it, and the owner
asks for the outcome. Files come from any processes; nothing here looks at them before they are all written.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from strop.base.background import in_background
from strop.run.manifest import Checkpoint


class PendingCheckpoint:
    """A checkpoint that was begun: `CheckpointStore.begin` makes it.

    Write into `folder`, from any process, then call `seal`, or `seal_after` to go on meanwhile, or `abandon`.
    """

    def __init__(
        self,
        step: int,
        folder: Path,
        *,
        score: float | None,
        facts: Mapping[str, Any],
        guard: Callable[[PendingCheckpoint], AbstractContextManager[None]],
        seal: Callable[[PendingCheckpoint], Checkpoint],
    ) -> None:
        """Made by the store.

        Args:
            step, score, facts: of the manifest.
            folder: where the files go; subfolders are fine.
            guard: around what may fail: removes the files and says what stays.
            seal: makes the files a checkpoint.
        """
        self.step = step
        self.folder = folder
        self.score = score
        self.facts = facts
        self._guard, self._seal = guard, seal
        self._sealing: Future[Checkpoint] | None = None
        self.is_over = False
        """Sealed, failed or abandoned, and the owner knows."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around what writes into `folder`: when it fails the checkpoint is given up, and nothing is left of it.

        Raises:
            CheckpointError: the disk refused; the message names the checkpoint that stays valid. Other errors of
                a writer pass through.
        """
        self._check_open()
        try:
            with self._guard(self):
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
        try:
            return self._seal(self)
        finally:
            self.is_over = True

    def seal_after(self, written: Callable[[], object]) -> None:
        """Return at once; a thread calls `written`, which returns when every writer is done, then seals.

        Where the process ends before, what is unsealed counts as a crash during save.

        Args:
            written: raises what a writer raised. All writers have ended when it does, or the folder may return.
        """
        self._check_open()

        def seal() -> Checkpoint:
            with self._guard(self):
                written()
            return self._seal(self)

        self._sealing = in_background(seal, name=f"seal checkpoint {self.step}")

    def done(self) -> bool:
        """True once what `seal_after` began has ended, well or not."""
        return self._sealing is not None and self._sealing.done()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait for what `seal_after` began. The arguments and errors are those of `CheckpointStore.settle`."""
        if self._sealing is None:
            raise RuntimeError(f"checkpoint {self.step} was begun, but neither sealed nor abandoned")
        if wait([self._sealing], timeout).not_done:
            raise TimeoutError(
                f"checkpoint {self.step} is not on the disk after {timeout:g} s of waiting; check the disk of "
                f"{self.folder.parent}, or allow more time"
            )
        self.is_over = True
        return self._sealing.result()

    def abandon(self) -> None:
        """Give it up: nothing is left of it, and the one before stays the newest. For one that is not being sealed."""
        self._check_open()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.is_over = True

    def _check_open(self) -> None:
        if self.is_over or self._sealing is not None:
            raise RuntimeError(f"checkpoint {self.step} is being sealed, or was sealed or abandoned before")
