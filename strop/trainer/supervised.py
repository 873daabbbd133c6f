"""Supervised fine-tuning: the same run folder, checkpoints and promises as RL training, a simpler step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from strop.algorithms.aggregation import BatchTotals, batch_totals
from strop.base.device import device_name
from strop.base.metrics import Metric, metric_values
from strop.border import as_number
from strop.controller import WorkerGroup, as_list, role
from strop.data.config import SftDataConfig
from strop.data.readers import read_rows
from strop.data.sampler import PromptSampler, visit_uid
from strop.data.sft import SftDataset, SftExample
from strop.engines.model import load_tokenizer, read_shape
from strop.engines.ulysses import check_sequence_parallel
from strop.protocol import DataProto, columns
from strop.run import Checkpoint, Fate, RunFolder, digest
from strop.trainer.checkpointing import Checkpointer, is_due, restore_position
from strop.trainer.config import Config, check_ranks
from strop.trainer.launch import Say
from strop.trainer.phases import Phases
from strop.trainer.results import SftResult, sft_result_of
from strop.trainer.roles import role_mesh, start_runtime
from strop.trainer.stopping import StopRequest
from strop.trainer.threads import set_threads_of_run
from strop.trainer.trackers import TrackerGroup, TrackerSetup, check_trackers
from strop.workers.metrics import THROUGHPUT, TIMING
from strop.workers.rows import GRAD_NORM, merged_update
from strop.workers.supervised import LOSS, SupervisedWorker

VALIDATION_LOSS = Metric(
    "val/loss", "nats", "of `strop sft` on held-out rows: -log p, mean over trained tokens"
)


class SupervisedTrainer:
    """One fine-tuning."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        *,
        checkpoint: Checkpoint | None,
        say: Say,
        stop: StopRequest | None = None,
    ) -> None:
        self._config, self._run, self._say = config, run, say
        self._stop = stop or StopRequest()
        start_step = checkpoint.step if checkpoint is not None else 0
        threads = set_threads_of_run(config.resources, config.model, run, step=start_step)
        say(threads.line())
        sft = config.sft
        check_trackers(config.trainer.trackers)
        check_ranks("sft", sft.engine, config.resources.ranks)
        check_sequence_parallel(
            read_shape(config.model), sft.engine.sequence_parallel, config.resources.ranks
        )
        self._tokenizer = load_tokenizer(config.model)
        if not sft.data.train_files:
            raise ValueError("sft.data.train_files is empty; name at least one .parquet or .jsonl file")
        self._examples = self._load(sft.data, sft.data.train_files, "train")
        self._val = self._load(sft.data, sft.data.val_files, "val") if sft.data.val_files else None
        self._sampler = PromptSampler(
            range(len(self._examples)),
            sft.examples_per_update,
            config.trainer.seed,
            num_epochs=sft.num_epochs,
        )
        steps = self._sampler.num_steps
        assert steps is not None, "the sampler was given a number of epochs"
        self._num_steps = steps if sft.max_steps is None else min(steps, sft.max_steps)
        self._start_step = 0
        if checkpoint is not None:
            self._start_step = checkpoint.step
            restore_position(run, checkpoint, self._sampler)
        self._checkpoint = None if checkpoint is None else checkpoint.path

    def _load(self, data: SftDataConfig, files: Sequence[str], split: str) -> SftDataset:
        dataset = SftDataset(
            read_rows(files, self._config.data.cache_dir), self._tokenizer, data, split=split
        )
        self._say(dataset.report())
        return dataset

    def fit(self) -> SftResult:
        """Train to the last step and save it."""
        start = time.perf_counter()
        setup = TrackerSetup(
            folder=self._run.path, total_steps=self._num_steps, resume_step=self._start_step, label="sft"
        )
        with ExitStack() as stack:
            self._start_worker(stack)
            trackers = stack.enter_context(TrackerGroup(self._config.trainer.trackers, setup))
            if self._val is not None and self._wants_first_validation():
                trackers.log(0, self._validate(self._val, 0))
            for step in range(self._start_step + 1, self._num_steps + 1):
                with self._stop.step():
                    self._run_step(step, trackers)
            self._checkpointer.finish()
        seconds = time.perf_counter() - start
        loss, val_loss = self._last_losses()
        self._run.events.append(
            "finished", self._num_steps, fsync=True, seconds=seconds, loss=loss, val_loss=val_loss
        )
        return sft_result_of(self._run)

    def _run_step(self, step: int, trackers: TrackerGroup) -> None:
        """One step with its records and its checkpoint, which is also written where the run is asked to end."""
        numbers = self._step(step)
        is_last = step == self._num_steps
        if self._val is not None and (is_last or is_due(step, self._config.eval.every)):
            numbers |= self._validate(self._val, step)
        trackers.log(step, numbers)  # before the checkpoint: what it holds was logged
        if is_last or is_due(step, self._config.run.save_every):
            self._checkpointer.save(step, None, facts={}, is_last=is_last)
        self._checkpointer.poll()
        self._checkpointer.save_before_the_end(self._stop, step, facts={})

    def _start_worker(self, stack: ExitStack) -> None:
        config, sft = self._config, self._config.sft
        runtime = stack.enter_context(start_runtime(config, log_dir=self._run.path / "logs"))
        spec = role(
            SupervisedWorker,
            config.model,
            sft.engine,
            sft.optim,
            device=device_name(config.resources.device),
            num_updates=self._num_steps,
            checkpoint=self._checkpoint,
        ).on(role_mesh(config, "actor", sft.engine))
        self._worker: WorkerGroup[SupervisedWorker] = runtime.groups({"actor": spec})["actor"]
        self._checkpointer = Checkpointer(
            self._run,
            {"actor": self._worker},
            settings=config.run,
            tokenizer=self._tokenizer,
            source_model=Path(config.model.path),
            sampler=self._sampler,
        )
        stack.callback(self._checkpointer.settle)

    def _last_losses(self) -> tuple[float, float | None]:
        """Training and validation loss from the records: a resume may have had no step left to do."""
        steps, validations = self._run.events.read("step"), self._validations()
        loss = as_number(steps[-1].get("loss")) if steps else math.nan
        return loss, as_number(validations[-1].get("loss")) if validations else None

    def _step(self, step: int) -> dict[str, float]:
        phases = Phases()
        visits = self._sampler.next()
        ids = [f"{visit_uid(epoch, row)}/0" for epoch, row in visits]
        self._run.ledger.issue(step, ids)
        batch = make_sft_batch([self._examples[row] for _, row in visits])
        with phases.phase("update"):
            update = merged_update(as_list(self._worker.call.update(batch, sft_totals(batch))))
        skipped = update.skipped
        if skipped:
            self._run.events.append("skipped_update", step, reason=skipped)
            self._say(f"step {step} skipped an update: {skipped}")
        fate = Fate("filtered", skipped) if skipped else Fate("trained")
        self._run.ledger.settle(step, dict.fromkeys(ids, fate))
        numbers = metric_values(update.metrics)
        tensors = batch.tensors()
        self._run.fingerprints.append(
            step,
            data=digest(ids),
            prompt_tokens=digest(
                columns.flat(tensors["prompts"]).numpy(), columns.flat(tensors["responses"]).numpy()
            ),
            loss=digest([numbers[LOSS].hex(), numbers[GRAD_NORM.of("train")].hex()]),
            weights=as_list(self._worker.call.checksum())[0],
        )
        num_tokens = int(
            columns.row_lengths(tensors["prompts"]).sum() + columns.row_lengths(tensors["responses"]).sum()
        )
        numbers[TIMING.of("step")] = phases.total()
        numbers[THROUGHPUT] = num_tokens / phases.total()
        self._run.events.append(
            "step", step, seconds=phases.total(), phases=phases.seconds, loss=numbers[LOSS]
        )
        return numbers

    def _wants_first_validation(self) -> bool:
        """False also when a start that came no further than this left one behind."""
        return self._config.eval.before_train and self._start_step == 0 and not self._validations()

    def _validations(self) -> list[dict[str, Any]]:
        """Records of validations, the oldest first."""
        return self._run.events.read("validation")

    def _validate(self, dataset: SftDataset, step: int) -> dict[str, float]:
        """The validation loss, with its record."""
        loss = self._mean_loss(dataset)
        self._run.events.append("validation", step, loss=loss)
        return {VALIDATION_LOSS: loss}

    def _mean_loss(self, dataset: SftDataset) -> float:
        """Mean loss per trained token."""
        size = self._config.sft.examples_per_update
        total, count = 0.0, 0.0
        for start in range(0, len(dataset), size):
            examples = [dataset[index] for index in range(start, min(start + size, len(dataset)))]
            batch = make_sft_batch(examples)
            log_probs = columns.flat(self._worker.call.compute_log_prob(batch).tensors()["log_probs"])
            mask = columns.flat(batch.tensors()["loss_mask"])
            total -= float(log_probs[mask].sum())
            count += float(mask.sum())
        return total / count


def make_sft_batch(examples: Sequence[SftExample]) -> DataProto:
    """One optimizer batch: each conversation as prompt (up to the first trained token) and response.

    Columns prompts [B, P~], responses and loss_mask [B, R~], true on trained tokens.
    """
    prompts, responses, masks = [], [], []
    for example in examples:
        cut = example.loss_mask.index(True)
        if cut == 0:
            raise ValueError(
                f"sft row {example.row} is trained from its first token, which nothing predicts; the chat template "
                f"should begin with a token of its own or a user message"
            )
        prompts.append(torch.tensor(example.token_ids[:cut]))
        responses.append(torch.tensor(example.token_ids[cut:]))
        masks.append(torch.tensor(example.loss_mask[cut:]))
    return DataProto.from_dict(
        {
            "prompts": columns.jagged(prompts),
            "responses": columns.jagged(responses),
            "loss_mask": columns.jagged(masks),
        }
    )


def sft_totals(batch: DataProto) -> BatchTotals:
    """What the loss of an optimizer batch divides by."""
    mask = batch.tensors()["loss_mask"]
    return batch_totals(columns.flat(mask), columns.row_lengths(mask))


def fine_tune(config: Config, run: RunFolder, *, checkpoint: Checkpoint | None = None, say: Say) -> SftResult:
    """Run a fine-tuning to its end; arguments as those of `strop.trainer.loop.train`."""
    stop = StopRequest()
    with stop.listening():
        return SupervisedTrainer(config, run, checkpoint=checkpoint, say=say, stop=stop).fit()
