"""The steps of a fine-tuning, its records and its validation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from strop.algorithms.aggregation import BatchTotals, batch_totals
from strop.controller import RoleSpec, WorkerGroup, as_list, role
from strop.data.mixture import weighted_epochs, weights_of_sources
from strop.data.sampler import PromptSampler
from strop.data.sft.dataset import SftDataset
from strop.data.sft.rows import read_sft_rows
from strop.data.sft.stored_conversation import SftExample
from strop.data.visit_ids import visit_uid
from strop.engines.causal_lm import max_positions
from strop.engines.config import ModelConfig
from strop.engines.learning_rates import too_large
from strop.engines.model import check_language_model, load_model_config, load_tokenizer
from strop.engines.model_folder import named_ends
from strop.engines.multimodal.families import media_token_ids, takes_media
from strop.engines.parallel.ulysses import check_sequence_parallel
from strop.observability.trackers.group import TrackerGroup, check_trackers
from strop.observability.trackers.setup import TrackerSetup
from strop.protocol import DataProto, columns
from strop.run import Checkpoint, Fate, RunFolder, digest
from strop.trainer.callbacks import Reporter, StopRequest
from strop.trainer.checkpointing import is_due, restore_position
from strop.trainer.checks.parallel import check_ranks
from strop.trainer.config import Config
from strop.trainer.environment import environment_of
from strop.trainer.fault_tolerance.background import checkpointer
from strop.trainer.fault_tolerance.signals import SignalRequest
from strop.trainer.sft.result import SftResult, sft_result
from strop.trainer.start import optimizer_of
from strop.trainer.threads import set_threads_of_run
from strop.trainer.timing import Stages
from strop.trainer.worker_groups import role_mesh, start_runtime
from strop.utils.device import device_name
from strop.utils.gc_freeze import settled
from strop.utils.metrics import Metric, metric_values
from strop.workers.metrics import THROUGHPUT, TIMING
from strop.workers.models import TrainingInit
from strop.workers.rows import GRAD_NORM, Update, flat_mask, merged_update
from strop.workers.sft import LOSS, TEACHER, SupervisedWorker

VALIDATION_LOSS = Metric(
    "val/loss", "nats", "of `strop sft` on held-out rows: -log p, mean over trained tokens"
)


class SupervisedTrainer:
    """Trainer of one fine-tuning run; a subclass trains on rows of another kind."""

    name = "sft"
    """Of the command and its section of the configuration."""
    loss: str = LOSS
    """Name of the metric that is the loss."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        *,
        checkpoint: Checkpoint | None,
        say: Reporter,
        stop: StopRequest | None = None,
    ) -> None:
        self._config, self._run, self._say = config, run, say
        self._stop = stop or SignalRequest()
        self._stop.start(config.run)
        self._start_step = checkpoint.step if checkpoint is not None else 0
        threads = set_threads_of_run(config.resources, config.model, run, step=self._start_step)
        say(threads.line())
        self._sft = sft = self._own_section(config)
        check_trackers(config.trainer.trackers)
        check_ranks(self.name, sft.engine, config.resources.ranks)
        self._check_model()
        ranks, size = config.resources.ranks, sft.engine.sequence_parallel
        check_sequence_parallel(load_model_config(config.model), size, ranks, section=f"{self.name}.engine")
        if rate := too_large(self.name, sft.optim, has_adapter=config.model.lora.enabled):
            say(f"WARNING: {rate.text}: {rate.advice}")
        self._tokenizer = load_tokenizer(config.model)
        if not sft.data.train_files:
            raise ValueError(
                f"{self.name}.data.train_files is empty; name at least one .parquet or .jsonl file"
            )
        self._examples = self._load(sft.data, sft.data.train_files, "train")
        self._val = self._load(sft.data, sft.data.val_files, "val") if sft.data.val_files else None
        if size > 1 and any(
            examples is not None and examples.has_media for examples in (self._examples, self._val)
        ):
            raise ValueError(
                f"{self.name}.engine.sequence_parallel is {size}, but conversations have images, and it divides "
                f"sequences over ranks, which images cannot be: use {self.name}.engine.sequence_parallel=1"
            )
        self._check_positions()
        self._sampler = self._order()
        if checkpoint is not None:
            restore_position(run, checkpoint, self._sampler)
        steps = self._sampler.num_steps
        assert steps is not None, "the sampler was given a number of epochs"
        self._num_steps = steps if sft.max_steps is None else min(steps, sft.max_steps)
        self._checkpoint = None if checkpoint is None else checkpoint.path
        self._optimizer = optimizer_of(run, checkpoint)
        self._stop.warn(run, self._start_step, say)

    def _check_positions(self) -> None:
        """Refuse conversations that are longer than the model is made for, before it is loaded."""
        limit = max_positions(load_model_config(self._config.model))
        for split, rows in (("train", self._examples), ("val", self._val)):
            if limit is not None and rows is not None and not rows.has_media and rows.longest - 1 > limit:
                raise ValueError(
                    f"the longest conversation of the {split} files has {rows.longest} tokens, but the model in "
                    f"{self._config.model.path} is made for {limit} positions: set {self.name}.data.max_tokens={limit}"
                )

    def _order(self) -> PromptSampler:
        """Rows that a step visits."""
        sft, seed = self._sft, self._config.trainer.seed
        chosen, num_epochs = None, sft.num_epochs
        if weights := self._source_weights():
            chosen, rounds = weighted_epochs(self._examples.sources, weights, num_epochs, seed)
            num_epochs = rounds or num_epochs
        return PromptSampler(
            range(len(self._examples)), sft.examples_per_update, seed, num_epochs=num_epochs, chosen=chosen
        )

    def _own_section(self, config: Config) -> Any:
        return config.sft

    def _source_weights(self) -> Mapping[str, float]:
        """Visits per epoch of the rows of a source, where they differ."""
        data = self._sft.data
        return weights_of_sources(
            self._examples.sources, data.source_weights, data.source_shares, section=f"{self.name}.data"
        )

    def _check_model(self) -> None:
        """Refuse a model that cannot be trained so, before it is loaded."""
        check_language_model(self._config.model)

    def _load(self, data: Any, files: Sequence[str], split: str) -> Any:
        rows = read_sft_rows(files, self._config.data.cache_dir)
        dataset = SftDataset(rows.rows, self._tokenizer, data, split=split, sources=rows.sources)
        self._report_data(dataset, split)
        _check_media_tokens(dataset, self._config.model)
        if self._sft.distillation.is_on and split == "train":
            self._say(f"a teacher's {checked_top_k(dataset)} most likely tokens in each place")
        return dataset

    def _report_data(self, dataset: Any, split: str) -> None:
        """Report the data, and the end of its answers."""
        self._say(dataset.report())
        if split == "train" and (note := dataset.ends.note(named_ends(self._config.model, self._tokenizer))):
            self._say(note)

    def fit(self) -> SftResult:
        """Train to the last step and save it."""
        start = time.perf_counter() - self._run.seconds_of_steps()
        setup = TrackerSetup(
            folder=self._run.path,
            total_steps=self._num_steps,
            resume_step=self._start_step,
            project=self._config.trainer.project_name,
            name=self._config.trainer.experiment_name,
            label=self.name,
        )
        with ExitStack() as stack:
            self._start_worker(stack)
            stack.enter_context(settled())
            self._begin()
            trackers = stack.enter_context(TrackerGroup(self._config.trainer.trackers, setup))
            if self._val is not None and self._wants_first_validation():
                trackers.log(0, self._validate(self._val, 0))
            for step in range(self._start_step + 1, self._num_steps + 1):
                with self._stop.step():
                    self._run_step(step, trackers)
            self._checkpointer.finish()
        seconds = time.perf_counter() - start
        losses = {"loss": self._last_loss("step"), "val_loss": self._last_loss("validation")}
        self._run.events.append("finished", self._num_steps, fsync=True, seconds=seconds, **losses)
        return sft_result(self._run)

    def _begin(self) -> None:
        """Hook for work with the starting model, before the first step of this process."""

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
        self._stop.check_time(self._say)
        self._checkpointer.save_before_the_end(self._stop, step, facts={})

    def _start_worker(self, stack: ExitStack) -> None:
        config, sft = self._config, self._sft
        runtime = stack.enter_context(start_runtime(config, log_dir=self._run.path / "logs"))
        learning = TrainingInit(
            device=device_name(config.resources.device),
            num_updates=self._num_steps,
            checkpoint=self._checkpoint,
            optimizer=self._optimizer,
        )
        spec = self._role(learning)
        mesh = role_mesh(config, "actor", sft.engine)
        self._worker: WorkerGroup[Any] = runtime.groups({"actor": spec.on(mesh)})["actor"]
        self._checkpointer = checkpointer(config.run)(
            self._run,
            {"actor": self._worker},
            settings=config.run,
            tokenizer=self._tokenizer,
            source_model=Path(config.model.path),
            sampler=self._sampler,
            say=self._say,
            limit_s=config.resources.call_timeout_s,
        )
        stack.callback(self._checkpointer.finish_background)

    def _role(self, learning: TrainingInit) -> RoleSpec[Any]:
        """Role that is made on every rank."""
        sft = self._sft
        return role(SupervisedWorker, self._config.model, sft.engine, sft.optim, learning, sft.distillation)

    def _last_loss(self, kind: str) -> object:
        """From the records, where there is one of this kind: a resume may have had no step left to do."""
        events = self._run.events.read(kind)
        return events[-1].get("loss") if events else None

    def _step(self, step: int) -> dict[str, float]:
        stages = Stages()
        visits = self._sampler.next()
        ids = [f"{visit_uid(epoch, row)}/0" for epoch, row in visits]
        self._run.ledger.issue(step, ids)
        batch, update, further = self._learned([row for _, row in visits], stages)
        skipped = update.skipped
        if skipped:
            self._run.events.append("skipped_update", step, reason=skipped)
            self._say(f"step {step} skipped an update: {skipped}")
        fate = Fate("filtered", skipped) if skipped else Fate("trained")
        self._run.ledger.settle(step, dict.fromkeys(ids, fate))
        numbers = {**metric_values(update.metrics), **further}
        loss = numbers[self.loss]
        prompts, responses = (columns.flat(batch.tensors()[name]) for name in ("prompts", "responses"))
        self._run.fingerprints.append(
            step,
            data=digest(ids),
            prompt_tokens=digest(prompts.numpy(), responses.numpy()),
            loss=digest([loss.hex(), numbers[GRAD_NORM.of("train")].hex()]),
            weights=as_list(self._worker.call.checksum())[0],
        )
        numbers[TIMING.of("step")] = stages.total()
        numbers[THROUGHPUT] = (len(prompts) + len(responses)) / stages.total()
        self._run.events.append("step", step, seconds=stages.total(), phases=stages.seconds, loss=loss)
        return numbers

    def _learned(
        self, places: Sequence[int], stages: Stages
    ) -> tuple[DataProto, Update, Mapping[str, float]]:
        """One optimizer step on the rows at these places: its batch, what came of it, and further metrics."""
        examples = [self._examples[index] for index in places]
        batch = make_sft_batch(examples, with_teacher=self._sft.distillation.is_on)
        with stages.stage("update"):
            update = merged_update(as_list(self._worker.call.update(batch, sft_totals(batch))))
        return batch, update, {}

    def _wants_first_validation(self) -> bool:
        """False also when a start that came no further than this left one behind."""
        is_enabled = self._config.eval.before_train and self._start_step == 0
        return is_enabled and not self._run.events.read("validation")

    def _validate(self, dataset: Any, step: int) -> dict[str, float]:
        """The mean loss per trained token of held-out rows, with its record."""
        size = self._sft.examples_per_update
        total, count = 0.0, 0
        for start in range(0, len(dataset), size):
            indices = range(start, min(start + size, len(dataset)))
            batch = make_sft_batch([dataset[index] for index in indices])
            log_probs = columns.flat(self._worker.call.compute_log_prob(batch).tensors()["log_probs"])
            trained = log_probs[columns.flat(batch.tensors()["loss_mask"])]
            total -= float(trained.sum())
            count += len(trained)
        loss = total / count
        self._run.events.append("validation", step, loss=loss)
        return {VALIDATION_LOSS: loss}


def _check_media_tokens(dataset: SftDataset, model: ModelConfig) -> None:
    """Refuse tokens that stand for images without the images: recorded samples do not hold any.

    Raises:
        ValueError: with the row.
    """
    shape = load_model_config(model)
    if not takes_media(shape):
        return
    stand_for_media = set(media_token_ids(shape).values())
    for number in range(len(dataset)):
        example = dataset[number]
        if not example.media and not stand_for_media.isdisjoint(example.token_ids):
            raise ValueError(
                f"{dataset.split} row {example.row} has tokens that stand for images, but no images: recorded samples "
                f"do not hold them; use rows with messages and images"
            )


def checked_top_k(dataset: SftDataset) -> int:
    """Number of the teacher's tokens at each position.

    Raises:
        ValueError: there are none, or rows differ.
    """
    if not dataset.top_k:
        raise ValueError(
            f"sft.distillation.coef is set, but the rows have no columns {' and '.join(TEACHER)}: `strop generate "
            f"--top-logprobs` writes them, or set sft.distillation.coef=0"
        )
    return dataset.top_k


def make_sft_batch(examples: Sequence[SftExample], *, with_teacher: bool = False) -> DataProto:
    """One optimizer batch: each conversation as prompt (up to the first trained token) and response.

    Columns prompts [B, P~], responses and loss_mask [B, R~], true on trained tokens; media, where there are images;
    with a teacher, teacher_ids (int32) and teacher_logprobs [B, R~, K].
    """
    prompts, responses, masks = [], [], []
    top: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
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
        if with_teacher:
            assert example.teacher is not None, "the data set was checked for it"
            first = cut - example.teacher.start
            top[0].append(torch.from_numpy(example.teacher.ids[first:]))
            top[1].append(torch.from_numpy(example.teacher.log_probs[first:]))
    media = [example.media for example in examples]
    return DataProto.from_dict(
        {
            "prompts": columns.jagged(prompts),
            "responses": columns.jagged(responses),
            "loss_mask": columns.jagged(masks),
            **(
                {name: columns.jagged(rows) for name, rows in zip(TEACHER, top, strict=True)}
                if top[0]
                else {}
            ),
        },
        non_tensors={"media": media} if any(media) else {},
        meta_info={"temperature": 1.0},
    )


def sft_totals(batch: DataProto) -> BatchTotals:
    """Denominators of the loss of an optimizer batch."""
    return batch_totals(*flat_mask(batch.tensors()))


def fine_tune(
    config: Config,
    run: RunFolder,
    *,
    checkpoint: Checkpoint | None = None,
    say: Reporter,
    stop: StopRequest | None = None,
    trainer: type[SupervisedTrainer] = SupervisedTrainer,
) -> SftResult:
    """Run a fine-tuning, or what `trainer` does, to its end; other arguments as those of `strop.trainer.loop.train`."""
    stop = stop or SignalRequest()
    with environment_of(config.resources), stop.listening():
        return trainer(config, run, checkpoint=checkpoint, say=say, stop=stop).fit()
