"""A checkpoint that is sealed while its writers still write it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait

from strop.run.checkpoints import PendingCheckpoint
from strop.run.manifest import Checkpoint
from strop.utils.background import in_background


class Sealing:
    """A checkpoint that is sealed in a thread.

    Where the process ends before, what is unsealed counts as a crash during save.
    """

    def __init__(self, pending: PendingCheckpoint, written: Callable[[], object] = lambda: None) -> None:
        """Return at once; the thread calls `written`, then seals.

        Args:
            pending: begun.
            written: returns when every writer is done, and raises what a writer raised; all of them have ended then, or
                the folder may return.
        """

        def seal() -> Checkpoint:
            with pending.writing():
                written()
            return pending.seal()

        self._pending = pending
        self._future = in_background(seal, name=f"seal checkpoint {pending.step}")

    def done(self) -> bool:
        """It has ended, well or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait for the checkpoint.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            CheckpointError: it could not be saved; the message names the checkpoint that stays valid.
            TimeoutError: it takes longer; it goes on.
        """
        if wait([self._future], timeout).not_done:
            raise TimeoutError(
                f"checkpoint {self._pending.step} is not on the disk after {timeout:g} s of waiting; check the disk of "
                f"{self._pending.folder.parent}, or allow more time"
            )
        return self._future.result()
