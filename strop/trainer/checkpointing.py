"""What a training checkpoint holds, for every kind of training: enough for a resume to be a continuation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.data.sampler import PromptSampler
from strop.run import Checkpoint, RunError, RunFolder


def save_checkpoint(
    run: RunFolder,
    step: int,
    save_worker: Callable[[Path], object],
    *,
    tokenizer: Any,
    source_model: Path,
    sampler: PromptSampler,
    score: float | None,
) -> Checkpoint:
    """Write a checkpoint: `model/` is an ordinary Hugging Face folder, the manifest holds the position in the data.

    Raises:
        CheckpointError: it could not be written; the one before stays valid.
        LedgerError: the sample ledger contradicts itself.
    """
    run.ledger.check()
    run.events.sync()

    def write(folder: Path) -> None:
        save_worker(folder)
        tokenizer.save_pretrained(folder / "model")
        settings = source_model / "generation_config.json"
        if settings.is_file():  # save_pretrained writes only generation settings that it was given
            (folder / "model" / settings.name).write_bytes(settings.read_bytes())

    facts = {"sampler": sampler.state(), "ledger": run.ledger.state(), "chain": run.fingerprints.head}
    checkpoint = run.checkpoints.save(step, write, score=score, facts=facts)
    run.events.append("checkpoint", step, fsync=True, path=checkpoint.path.name, score=score)
    return checkpoint


def restore_position(run: RunFolder, checkpoint: Checkpoint, sampler: PromptSampler) -> None:
    """Put ledger and sampler where they were when the checkpoint was written."""
    facts = checkpoint.manifest.facts
    run.ledger.restore(checkpoint.step, facts["ledger"])
    sampler.restore(run.ledger.consumed(), facts["sampler"])


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Where an existing run goes on."""

    checkpoint: Checkpoint | None
    """None: from the beginning, because no checkpoint was written yet."""
    is_finished: bool
    """True when there is nothing left to do."""
    lines: list[str]
    """What the person who resumes should know."""


def find_continuation(run: RunFolder) -> Continuation:
    """The last valid checkpoint of a run; the run is rolled back to it.

    Raises:
        RunError: checkpoints exist, but none is valid.
    """
    if run.events.read("finished"):
        return Continuation(
            checkpoint=None, is_finished=True, lines=[f"{run.path} is finished; nothing to resume"]
        )
    checkpoint, lines = run.checkpoints.latest_valid()
    if checkpoint is None and run.events.read("checkpoint"):
        raise RunError(
            f"{run.path} has no valid checkpoint left ({'; '.join(lines)}); restore its checkpoints folder, or start "
            f"again in another folder with --out"
        )
    step = 0 if checkpoint is None else checkpoint.step
    before = run.ledger.counts()
    run.rollback(step)
    after = run.ledger.counts()
    repeated = before["issued"] - after["issued"]
    lines.append(
        f"resumed at step {step}: {after['trained']} samples trained, {repeated} after that step are made again, "
        f"0 lost"
    )
    return Continuation(checkpoint=checkpoint, is_finished=False, lines=lines)
