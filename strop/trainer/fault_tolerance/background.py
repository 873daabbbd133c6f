"""Checkpoints that are written while training goes on (run.async_save).

The roles copy their state and go on; `poll` has the checkpoint sealed, in a thread, once all files are there. Until
then the checkpoint before is the newest one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from strop.controller import as_list
from strop.run import CheckpointError, PendingCheckpoint, RunConfig
from strop.run.sealing import Sealing
from strop.trainer.checkpointing import SETTLE_S, Checkpointer


class BackgroundCheckpointer(Checkpointer):
    """As Checkpointer, beside the training."""

    _writing: PendingCheckpoint | None = None
    _sealing: Sealing | None = None

    def save(self, step: int, score: float | None, *, facts: Mapping[str, Any], is_last: bool) -> None:
        """Begin to write a checkpoint; the one before is waited for.

        Raises:
            CheckpointError: it, or the one before, could not be written; the last good one stays valid.
            LedgerError: the sample ledger contradicts itself.
        """
        with self._watched(step):
            self._finish()
            self._writing = self._write(step, score, facts=facts, is_last=is_last, in_background=True)

    def poll(self) -> None:
        """Bring the checkpoint that is being written one stage on, if it can be; never waits for files."""
        if self._writing is None:
            return
        if self._sealing is not None:
            if self._sealing.done():
                self.finish()
        elif all(all(as_list(group.call.is_checkpoint_written())) for group in self._trained.values()):
            self._finish_roles(self._writing)
            self._sealing = Sealing(self._writing)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, until it is sealed.

        Raises:
            CheckpointError: it could not be written; the one before stays valid.
        """
        if self._writing is not None:
            with self._watched(self._saved_step):
                self._finish()

    def _finish(self) -> None:
        pending, sealing = self._writing, self._sealing
        if pending is None:
            return
        self._writing = self._sealing = None
        if sealing is None:
            self._finish_roles(pending)
        self._record_sealed(pending, pending.seal() if sealing is None else sealing.result())

    def finish_background(self) -> None:
        """Let what runs in the background end, well or not: a seal of a run that failed, and copies."""
        if self._sealing is not None:
            with contextlib.suppress(CheckpointError, TimeoutError):
                self._sealing.result(SETTLE_S)
        super().finish_background()


def checkpointer(settings: RunConfig) -> type[Checkpointer]:
    """The class that writes the checkpoints of a run: in the background with run.async_save."""
    return BackgroundCheckpointer if settings.async_save else Checkpointer
