"""Training checkpoints, for every kind of training: they hold enough for a resume to be a continuation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.controller import WorkerGroup
from strop.data.sampler import PromptSampler
from strop.engines.role_checkpoint import CONFIG_FOLDER
from strop.engines.transformers4 import save_tokenizer
from strop.run import MODEL_FOLDER, Checkpoint, CheckpointError, PendingCheckpoint, RunConfig, RunFolder
from strop.trainer.callbacks import Reporter, StopRequest
from strop.trainer.fault_tolerance.disk import watched
from strop.trainer.sections import RoleName
from strop.workers.models import TrainedWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from strop.trainer.run_mirror import RunMirror

SETTLE_S = 600.0
"""Longest wait for copies that are under way at the end."""


class Checkpointer:
    """Checkpoints of a run: the sharded state of each trained role, the policy as a Hugging Face folder, and the
    position in the data.

    With run.async_save they are written beside the training (fault_tolerance/background.py).
    """

    def __init__(
        self,
        run: RunFolder,
        trained: Mapping[RoleName, WorkerGroup[TrainedWorker]],
        *,
        settings: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        source_model: Path,
        sampler: PromptSampler,
        texts: Callable[[], Mapping[str, str]] = dict,
        say: Reporter,
        limit_s: float,
        on_sealed: Callable[[Checkpoint], object] = lambda checkpoint: None,
    ) -> None:
        """Set the content of checkpoints.

        Args:
            run: the folder of the run.
            trained: the roles that learn, by name; the first one is the policy.
            settings: how to save.
            tokenizer: saved beside the policy.
            source_model: where the policy came from; its generation settings are saved too.
            sampler: its position is.
            texts: contents of further files, by name, at the moment of a save.
            say: takes lines for the person who watches.
            limit_s: seconds of writing after which the process ends.
            on_sealed: called with each checkpoint that is whole.
        """
        self._texts, self._on_sealed = texts, on_sealed
        self._watched = partial(watched, run, say=say, limit_s=limit_s)
        self._run, self._trained, self._settings = run, trained, settings
        self._tokenizer, self._source_model, self._sampler = tokenizer, source_model, sampler
        self._mirror: RunMirror | None = None
        if settings.copy_to:
            from strop.trainer.run_mirror import RunMirror  # libraries of hubs: slow to import

            self._mirror = RunMirror(run, settings.copy_to)
        self._saved_step = 0

    def save(self, step: int, score: float | None, *, facts: Mapping[str, Any], is_last: bool) -> None:
        """Write a checkpoint, or begin to.

        Args:
            step: steps done.
            score: decides which checkpoints are kept as the best.
            facts: plain values that a continuation needs besides.
            is_last: the run ends with this step.

        Raises:
            CheckpointError: it, or the one before, could not be written; the last good one stays valid.
            LedgerError: the sample ledger contradicts itself.
        """
        with self._watched(step):
            pending = self._write(step, score, facts=facts, is_last=is_last)
            self._finish_roles(pending)
            self._record_sealed(pending, pending.seal())

    def _write(
        self,
        step: int,
        score: float | None,
        *,
        facts: Mapping[str, Any],
        is_last: bool,
        in_background: bool = False,
    ) -> PendingCheckpoint:
        """All files of a checkpoint; in the background, those of roles may still be written afterwards."""
        run = self._run
        run.ledger.check()
        run.events.sync()
        position = {
            "sampler": self._sampler.state(),
            "sampler_progress": self._sampler.progress(),
            "ledger": run.ledger.state(),
            "chain": run.fingerprints.head,
        }
        pending = run.checkpoints.begin(step, score=score, facts={**facts, **position})
        self._saved_step = step
        with pending.writing():
            for group in self._trained.values():
                group.call.save_checkpoint(pending.folder, in_background=in_background)
            for name, text in self._texts().items():
                (pending.folder / name).write_text(text)
            # What `strop export` needs besides the weights.
            save_tokenizer(self._tokenizer, pending.folder / next(iter(self._trained)) / CONFIG_FOLDER)
            if self._wants_model(is_last):
                self._save_model(pending.folder / MODEL_FOLDER)
        return pending

    def save_before_the_end(self, stop: StopRequest, step: int, *, facts: Mapping[str, Any]) -> None:
        """Save a checkpoint where a request asks the run to end, so that a resume goes on from here."""
        if not stop.number:
            return
        stop.finish_step()
        if self._saved_step != step:
            self.save(step, None, facts=facts, is_last=False)
        self.finish()
        self._run.events.append("interrupted", step, fsync=True, phase="", error=stop.reason)

    def poll(self) -> None:
        """Bring a checkpoint that is being written one stage on, if there is one; never waits for files."""

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, until it is sealed.

        Raises:
            CheckpointError: it could not be written; the one before stays valid.
        """

    def finish_background(self) -> None:
        """Let background copies end, well or not, where the run has failed too."""
        if self._mirror is not None:
            self._mirror.finish(SETTLE_S)

    def _record_sealed(self, pending: PendingCheckpoint, checkpoint: Checkpoint) -> None:
        """Record a checkpoint that is complete."""
        self._run.events.append(
            "checkpoint", checkpoint.step, fsync=True, path=checkpoint.path.name, score=pending.score
        )
        if self._mirror is not None:
            self._mirror.copy(checkpoint)
        self._on_sealed(checkpoint)

    def _finish_roles(self, pending: PendingCheckpoint) -> None:
        """Every role has written its files, or the checkpoint is given up."""
        with pending.writing():
            for group in self._trained.values():
                group.call.finish_checkpoint()

    def _wants_model(self, is_last: bool) -> bool:
        hf_model = self._settings.hf_model
        return hf_model == "always" or (hf_model == "last" and is_last)

    def _save_model(self, folder: Path) -> None:
        """The policy as an ordinary Hugging Face folder."""
        policy = next(iter(self._trained.values()))
        write_model(policy, folder, tokenizer=self._tokenizer, source=self._source_model)


def write_model(
    policy: WorkerGroup[TrainedWorker],
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    source: str | Path,
) -> None:
    """A policy as an ordinary Hugging Face folder.

    Args:
        policy: its role.
        folder: where to.
        tokenizer: saved beside it.
        source: folder that the policy came from; its generation settings are saved too.
    """
    policy.call.save_model(folder)
    save_tokenizer(tokenizer, folder)
    settings = Path(source) / "generation_config.json"
    if settings.is_file():  # save_pretrained writes only generation settings that it was given
        (folder / settings.name).write_bytes(settings.read_bytes())


def restore_position(run: RunFolder, checkpoint: Checkpoint, sampler: PromptSampler) -> None:
    """Put ledger and sampler where they were when the checkpoint was written.

    Raises:
        CheckpointError: its facts are not those that a run writes.
        ValueError: they are those of a run on other data.
    """
    facts = checkpoint.manifest.facts
    try:
        run.ledger.restore(checkpoint.step, facts["ledger"])
        sampler.restore(
            run.ledger.consumed(), facts["sampler"], facts.get("curriculum"), facts.get("sampler_progress"),
            step=checkpoint.step,
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is damaged: what its manifest says of the position in the data has another "
            f"form ({type(error).__name__}: {error}); remove it, and the run continues from an earlier one"
        ) from error


def is_due(step: int, every: int) -> bool:
    """True after every `every`-th step; 0 is never."""
    return every > 0 and step % every == 0
