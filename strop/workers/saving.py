"""What every trained role can do beside its own work: save and restore its state, and leave its device."""

from __future__ import annotations

from pathlib import Path

from strop.controller import Dispatch, Worker, register
from strop.engines.checkpoint import PendingSave
from strop.engines.lora import has_adapter, save_merged
from strop.engines.role_checkpoint import load_role, save_role
from strop.engines.training import TrainEngine


class TrainedWorker(Worker):
    """A role with an engine that learns.

    Concurrency: on several ranks every method is a collective, called on all of them in the same order.
    """

    engine: TrainEngine

    def _hold(self, engine: TrainEngine, *, role: str, checkpoint: Path | None) -> None:
        """Take this engine as the role's, at the state of a checkpoint if there is one."""
        self.engine = engine
        self._role = role
        self._pending: PendingSave | None = None
        if checkpoint is not None:
            load_role(checkpoint / role, engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: Path, *, in_background: bool = False) -> None:
        """This rank's part of weights and optimizer state into the role's folder inside `folder`.

        Args:
            folder: of the checkpoint; all ranks see the same one.
            in_background: return when the state is copied to host memory; `finish_checkpoint` waits for the rest.
        """
        self.finish_checkpoint()
        self._pending = save_role(folder / self._role, self.engine, in_background=in_background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_checkpoint_written(self) -> bool:
        """False while this rank still writes."""
        return self._pending is None or self._pending.done()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self) -> None:
        """Wait until this rank has written everything; raises what the disk refused."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model(self, folder: Path) -> None:
        """The model as an ordinary Hugging Face folder, written by rank 0; an adapter is merged into it."""
        if has_adapter(self.engine.model):
            save_merged(self.engine.model, folder, write=self.rank == 0)
        else:
            self.engine.save_model(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checksum(self) -> str:
        """Digest of all weights; the same on every rank and for any number of ranks."""
        return self.engine.checksum()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """The role is idle: it leaves the device until it is called again."""
        self.engine.offload()
