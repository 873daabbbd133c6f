"""Steps, records and checkpoints of training on given answers: fine-tuning, and training on preferences."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Generic, TypeVar

from strop.controller import RoleSpec, WorkerGroup, as_list
from strop.data.preference_config import PreferConfig
from strop.data.preference_rows import PreferenceDataset
from strop.data.sampler import PromptSampler
from strop.data.sft.config import SftConfig
from strop.data.sft.dataset import SftDataset
from strop.data.visit_ids import visit_uid
from strop.engines.learning_rates import too_large, unfinished_warm_up
from strop.engines.model_facts import max_positions
from strop.engines.model_folder import named_ends
from strop.engines.parallel.axes import check_axes
from strop.engines.parallel.model_axes import check_model_axes
from strop.engines.pretrained_config import load_model_config
from strop.engines.tokenizer import load_tokenizer
from strop.observability.trackers.group import TrackerGroup, check_trackers
from strop.observability.trackers.setup import TrackerSetup
from strop.protocol import DataProto, columns
from strop.run import Checkpoint, Fate, RunFolder, digest
from strop.run.folder import ROLES_STARTED
from strop.trainer.callbacks import Reporter, StopRequest
from strop.trainer.checkpointing import is_due, restore_position
from strop.trainer.checks.devices import check_devices
from strop.trainer.checks.held_out import check_examples
from strop.trainer.checks.parallel import check_parallel_settings, check_shares_no_images
from strop.trainer.checks.template_variables import check_variables
from strop.trainer.config import Config
from strop.trainer.crash_event import recording_failure
from strop.trainer.fault_tolerance.background import checkpointer
from strop.trainer.fault_tolerance.signals import SignalRequest
from strop.trainer.profiling import StepProfiler
from strop.trainer.rehearsal import is_rehearsed, rehearse, tokens_together
from strop.trainer.role_specs import role_mesh
from strop.trainer.sft.result import SftResult, sft_result
from strop.trainer.start import optimizer_of
from strop.trainer.threads import set_threads_of_run
from strop.trainer.timing import Stages
from strop.trainer.token_budgets import hold_budgets, report_halvings
from strop.trainer.worker_groups import start_runtime
from strop.utils.device import device_name
from strop.utils.gc_freeze import settled
from strop.utils.metrics import metric_values
from strop.workers.metrics import THROUGHPUT, TIMING
from strop.workers.models import TrainedWorker, TrainingInit
from strop.workers.rows import GRAD_NORM, Update

S = TypeVar("S", SftConfig, PreferConfig)
"""Section of the configuration."""
D = TypeVar("D", SftDataset, PreferenceDataset)
W = TypeVar("W", bound=TrainedWorker)


class SupervisedTrainer(ABC, Generic[S, D, W]):
    """Trainer of one run on given answers; SftTrainer and PreferenceTrainer say what is learned from them."""

    name: str
    """Of the command and its section of the configuration."""
    loss: str
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
        self._settings: S = self._section(config)
        settings = self._settings
        self._check_settings()
        self._check_model()
        engine, shape = settings.engine, load_model_config(config.model)
        check_model_axes(shape, engine, config.resources.ranks, section=f"{self.name}.engine")
        if rate := too_large(self.name, settings.optim, has_adapter=config.model.lora.enabled):
            say(f"WARNING: {rate.text}: {rate.advice}")
        self._tokenizer = load_tokenizer(config.model)
        if not settings.data.train_files:
            raise ValueError(
                f"{self.name}.data.train_files is empty; name at least one .parquet or .jsonl file"
            )
        if unread := check_variables(
            f"{self.name}.data", settings.data.chat_template_kwargs, self._tokenizer
        ):
            say(f"WARNING: {unread.text}: {unread.advice}")
        self._examples: D = self._load(settings.data.train_files, "train")
        self._val: D | None = self._validation_examples()
        if any(examples is not None and examples.has_media for examples in (self._examples, self._val)):
            check_shares_no_images(self.name, engine, "conversations")
        self._check_positions()
        self._sampler = self._make_sampler()
        if checkpoint is not None:
            restore_position(run, checkpoint, self._sampler)
        steps = self._sampler.num_steps
        assert steps is not None, "the sampler was given a number of epochs"
        self._num_steps = steps if settings.max_steps is None else min(steps, settings.max_steps)
        if warning := unfinished_warm_up(self.name, settings.optim, self._num_steps):
            say(f"WARNING: {warning}")
        self._checkpoint = None if checkpoint is None else checkpoint.path
        self._optimizer = optimizer_of(run, checkpoint)
        self._stop.warn(run, self._start_step, say)

    def _check_settings(self) -> None:
        """Refuse settings that this command does not have, or that do not go together, before anything is loaded."""
        config, settings = self._config, self._settings
        check_trackers(config.trainer.trackers)
        if config.resources.min_nodes:
            raise ValueError(
                f"resources.min_nodes is {config.resources.min_nodes}, but only `strop train` goes on with fewer "
                f"machines: leave it out of `strop {self.name}`"
            )
        check_devices(config, self.name)
        check_axes(settings.engine, config.resources.ranks, section=f"{self.name}.engine")
        check_parallel_settings(
            self.name,
            settings.engine,
            settings.optim,
            config.model,
            lora=("model.lora.rank", config.model.lora),
        )

    def _validation_examples(self) -> D | None:
        """Examples of the validation, where there is one; those that are trained on are said."""
        data = self._settings.data
        if not data.val_files:
            return None
        examples = self._load(data.val_files, "val")
        if held_out := check_examples(f"{self.name}.data", data, self._examples, examples):
            self._say(f"WARNING: {held_out.text}: {held_out.advice}")
        return examples

    def _check_positions(self) -> None:
        """Refuse conversations that are longer than the model is made for, before it is loaded."""
        limit = max_positions(load_model_config(self._config.model))
        for split, rows in (("train", self._examples), ("val", self._val)):
            if limit is not None and rows is not None and not rows.has_media and rows.longest - 1 > limit:
                raise ValueError(
                    f"the longest conversation of the {split} files has {rows.longest} tokens, but the model in "
                    f"{self._config.model.path} is made for {limit} positions: set {self.name}.data.max_tokens={limit}"
                )

    def _make_sampler(self) -> PromptSampler:
        """Order of the rows: each once per epoch."""
        settings, seed = self._settings, self._config.trainer.seed
        rows = range(len(self._examples))
        return PromptSampler(rows, settings.examples_per_update, seed, num_epochs=settings.num_epochs)

    @abstractmethod
    def _section(self, config: Config) -> S:
        """Section of the configuration that the run reads."""

    @abstractmethod
    def _check_model(self) -> None:
        """Refuse a model that cannot be trained so, before it is loaded.

        Raises:
            ValueError: the sentence says why.
        """

    @abstractmethod
    def _load(self, files: Sequence[str], split: str) -> D:
        """Tokenised rows of the files of a split, `train` or `val`."""

    @abstractmethod
    def _role(self, learning: TrainingInit) -> RoleSpec[W]:
        """Role that is made on every rank."""

    @abstractmethod
    def _learn(self, places: Sequence[int], stages: Stages) -> tuple[DataProto, Update, Mapping[str, float]]:
        """One optimizer step on the rows at these places: its batch, what came of it, and further metrics."""

    @abstractmethod
    def _validate(self, dataset: D, step: int) -> dict[str, float]:
        """Metrics of the held-out rows, with their record."""

    def _is_reached(self, step: int) -> bool:
        """Hook: True if the validation after this step, which is in the records, ends the run."""
        return False

    def _report_data(self, dataset: D, split: str) -> None:
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
            self._run.events.append(ROLES_STARTED, self._start_step)
            self._fit_memory()
            self._begin()
            profiler = StepProfiler(self._config.trainer, self._run, say=self._say)
            profiler.note_last(self._num_steps)
            trackers = stack.enter_context(TrackerGroup(self._config.trainer.trackers, setup))
            if self._val is not None and self._wants_first_validation():
                trackers.log(0, self._validate(self._val, 0))
            step = self._start_step
            while step < self._num_steps and not self._is_reached(step):
                step, stages = step + 1, Stages()
                with (
                    self._stop.step(),
                    profiler.step(step, [self._worker]),
                    recording_failure(self._run, step, stages, self._stop),
                ):
                    self._run_step(step, stages, trackers)
            self._checkpointer.finish()
        seconds = time.perf_counter() - start
        losses = {"loss": self._last_loss("step"), "val_loss": self._last_loss("validation")}
        self._run.events.append("finished", step, fsync=True, seconds=seconds, **losses)
        return sft_result(self._run)

    def _fit_memory(self) -> None:
        """Take over the token budget of earlier starts, and rehearse the longest batch."""
        hold_budgets({"actor": self._worker}, {"actor": self._settings.engine}, self._run)
        if not is_rehearsed(self._config.trainer, self._config.resources.device):
            return
        self._worker.call.make_optimizer_state()
        engine, (prompt, response) = self._settings.engine, self._examples.longest_parts
        num_rows = -(-self._rows_per_update // role_mesh(self._config, "actor", engine).dp)
        enough = -(-tokens_together(engine) // (prompt + response - 1))
        batch = [(prompt, (response,))] * min(num_rows, enough)
        rehearse("actor", self._worker, batch, self._run, self._start_step, self._say)
        self._report_halvings(self._start_step)

    @property
    def _rows_per_update(self) -> int:
        """Most rows of an optimizer step."""
        return self._settings.examples_per_update

    def _report_halvings(self, step: int) -> dict[str, float]:
        settings = {"actor": (f"{self.name}.engine", self._settings.engine)}
        return report_halvings({"actor": self._worker}, settings, self._run, step, self._say)

    def _begin(self) -> None:
        """Hook for work with the starting model, before the first step of this process."""

    def _run_step(self, step: int, stages: Stages, trackers: TrackerGroup) -> None:
        """One step with its records and its checkpoint, which is also written where the run is asked to end."""
        numbers = self._step(step, stages)
        is_last = step == self._num_steps
        if self._val is not None and (is_last or is_due(step, self._config.eval.every)):
            numbers |= self._validate(self._val, step)
            is_last = is_last or self._is_reached(step)
        trackers.log(step, numbers)  # before the checkpoint: what it holds was logged
        if is_last or is_due(step, self._config.run.save_every):
            with stages.stage("save_checkpoint"):
                self._checkpointer.save(step, None, facts={}, is_last=is_last)
            trackers.log(step, {TIMING.of("save_checkpoint"): stages.seconds["save_checkpoint"]})
        self._checkpointer.poll()
        self._stop.check_time(self._say)
        self._checkpointer.save_before_the_end(self._stop, step, facts={})

    def _start_worker(self, stack: ExitStack) -> None:
        config, settings = self._config, self._settings
        runtime = stack.enter_context(start_runtime(config, log_dir=self._run.path / "logs"))
        learning = TrainingInit(
            device=device_name(config.resources.device),
            num_updates=self._num_steps,
            checkpoint=self._checkpoint,
            optimizer=self._optimizer,
        )
        spec = self._role(learning)
        mesh = role_mesh(config, "actor", settings.engine)
        self._worker: WorkerGroup[W] = runtime.groups({"actor": spec.on(mesh)})["actor"]
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

    def _last_loss(self, kind: str) -> object:
        """From the records, where there is one of this kind: a resume may have had no step left to do."""
        events = self._run.events.read(kind)
        return events[-1].get("loss") if events else None

    def _step(self, step: int, stages: Stages) -> dict[str, float]:
        visits = self._sampler.next()
        ids = [f"{visit_uid(epoch, row)}/0" for epoch, row in visits]
        self._run.ledger.issue(step, ids)
        batch, update, further = self._learn([row for _, row in visits], stages)
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
        numbers |= self._report_halvings(step)
        numbers[TIMING.of("step")] = stages.total()
        numbers[THROUGHPUT] = (len(prompts) + len(responses)) / stages.total()
        self._run.events.append("step", step, seconds=stages.total(), phases=stages.seconds, loss=loss)
        return numbers

    def _wants_first_validation(self) -> bool:
        """False also when a start that came no further than this left one behind."""
        is_enabled = self._config.eval.before_train and self._start_step == 0
        return is_enabled and not self._run.events.read("validation")
