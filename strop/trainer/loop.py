"""The training loop, in one controller process: from a start of the run to its end, or to what ends its processes.

`Trainer.step` is the algorithm: samples are collected, learned from, and the new weights brought to generation.
`learning.py` has the part from scored samples to new weights; everything around it (records, checkpoints, validation,
trackers) happens in `Trainer.fit`.

Concurrency: one thread, which calls worker groups and waits for them. Every wait has a deadline in the part
that waits: generation (rollout.timeout_s), scoring (reward.timeout_s), calls of workers in other processes
(resources.call_timeout_s).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.engines.memory import describe_memory
from strop.engines.precision import describe_precision
from strop.observability.health import HealthMonitor
from strop.observability.trackers.group import TrackerGroup, check_trackers
from strop.observability.trackers.setup import METRICS_FILE, TrackerSetup, read_metrics
from strop.run import Checkpoint, RunFolder
from strop.run.folder import ROLES_STARTED
from strop.run.heartbeat import heartbeat
from strop.trainer.callbacks import Callbacks, Reporter, StopRequest
from strop.trainer.checkpointing import is_due, restore_position
from strop.trainer.checks.idle_settings import idle_settings
from strop.trainer.checks.models import check_models
from strop.trainer.checks.recording import check_recording
from strop.trainer.checks.schedules import schedule_warnings
from strop.trainer.collectors.make import describe_collector, make_collector
from strop.trainer.config import Config
from strop.trainer.crash_event import recording_failure
from strop.trainer.early_stopping import EarlyStopping, TrainResult, is_best, train_result
from strop.trainer.fault_tolerance.background import checkpointer
from strop.trainer.fault_tolerance.elastic import check_for_more, start_elastic_runtime
from strop.trainer.fault_tolerance.signals import SignalRequest
from strop.trainer.learning import Learner
from strop.trainer.preflight.of_run import preflight_before_training
from strop.trainer.profiling import StepProfiler
from strop.trainer.records import StepRecord
from strop.trainer.rehearsal import is_rehearsed, rehearse_roles
from strop.trainer.replayed_run import read_recorded
from strop.trainer.reward_certificate import note_certificate
from strop.trainer.reward_trial import try_reward
from strop.trainer.row_results import row_results
from strop.trainer.setup import (
    TrainingData,
    load_training_data,
    sampling_of,
)
from strop.trainer.start import optimizer_of
from strop.trainer.step_logging import log_failures, step_metrics
from strop.trainer.threads import set_threads_of_run
from strop.trainer.timing import Stages
from strop.trainer.token_budgets import hold_budgets, report_halvings
from strop.trainer.undecided import UndecidedSources
from strop.trainer.validation import Validation, summarize_validation
from strop.trainer.worker_groups import WorkerGroups, make_cost_tracker, make_worker_groups, rollout_settings
from strop.utils.activity import activity
from strop.utils.gc_freeze import settled
from strop.workers import metrics as measure
from strop.workers.reports import SampleDecision, check_failed_episodes
from strop.workers.tracing.observer import check_observers


class Trainer:
    """Controller of one run, or of one start of it where processes died: `strop.trainer.train.train` makes it and calls
    `fit`."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        *,
        checkpoint: Checkpoint | None,
        say: Reporter,
        force: bool = False,
        stop: StopRequest | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.config, self._whole_config = config, config
        self._run = run
        self._say = say
        self._force = force
        self._stop = stop or SignalRequest()
        self._callbacks = callbacks or Callbacks()
        self._profiler = StepProfiler(config.trainer, run, say=say)
        self._stop.start(config.run)
        self.is_started = False
        """All roles are there."""
        self._has_saved = False
        """The last step was saved."""
        check_trackers(config.trainer.trackers)
        check_observers(config.rollout)
        check_models(config)
        self._checkpoint = checkpoint
        self._start_step = checkpoint.step if checkpoint is not None else 0
        self._recorded = read_recorded(run.path)
        threads = set_threads_of_run(config.resources, config.model, run, step=self._start_step)
        self.data: TrainingData = load_training_data(config)
        if config.trainer.skip_rollout:
            check_recording(config, self.data, first_step=self._start_step + 1)
        if self.data.growth is not None:
            self.data.growth.restore(run, self._start_step, self.data.sampler)
        if checkpoint is not None:
            restore_position(run, checkpoint, self.data.sampler)
        precision = describe_precision(config.model, config.resources.device)
        memory = describe_memory(
            config.model, config.actor.engine, device=config.resources.device, ranks=config.resources.ranks
        )
        self._costs = make_cost_tracker(config, run.path)
        for line in [
            *self.data.report(), config.arithmetic(), precision, memory, threads.line(), config.placement(),
            *schedule_warnings(config, self.data.num_steps), *idle_settings(config),
        ]:  # fmt: skip
            if line:
                say(line)
        self._stop.warn(run, self._start_step, say)

    def fit(self) -> TrainResult:
        """Train to the last step; the run folder then holds everything."""
        start = time.perf_counter() - self._run.seconds_of_steps()
        try_reward(self.config, self.data, self._run, self._say, costs=self._costs)
        with ExitStack() as stack:
            stack.enter_context(heartbeat(self._run.path / "logs" / "controller.log"))
            with activity("the start of the roles"):
                self._start_roles(stack)
            stack.enter_context(settled())
            self.is_started = True
            self._run.events.append(ROLES_STARTED, self._start_step)
            self._undecided = UndecidedSources(self.config.reward, self._run.events)
            self._fit_memory()
            if self._start_step == 0:
                note_certificate(self.config, self._run, self._say)
                self._preflight()
            self._health = self._health_monitor()
            setup = TrackerSetup(
                folder=self._run.path,
                total_steps=self.data.num_steps,
                resume_step=self._start_step,
                project=self.config.trainer.project_name,
                name=self.config.trainer.experiment_name,
            )
            trackers = stack.enter_context(TrackerGroup(self.config.trainer.trackers, setup))
            self.roles.progress.show = trackers.note
            if self._start_step == 0 and self._wants_first_validation():
                trackers.log(0, metrics := self._validate(0).metrics)
                self._health.observe(metrics)
            if self.data.growth is not None:
                self.data.growth.begin()
            last_step = self.data.num_steps if self._recorded is None else self._recorded.last_step
            step = self._start_step
            self._profiler.note_last(last_step)
            self._early_stopping = EarlyStopping(self.config.trainer, self._run, num_steps=last_step)
            self._early_stopping.reason = self._early_stopping.reason or self._nothing_left()
            while step < self.data.num_steps and not self._early_stopping.reason:
                step += 1
                with self._stop.step(), activity(f"step {step}"):
                    stages = Stages(self.roles)
                    with (
                        self._profiler.step(step, list(self.roles.groups.values())),
                        recording_failure(self._run, step, stages, self._stop),
                    ):
                        self._run_step(step, stages, trackers)
                    if not self._early_stopping.reason:  # the last step needs no other one
                        self._stop.check_time(self._say)
                    self._checkpointer.save_before_the_end(self._stop, step, facts=self._facts())
                if self._has_saved and self.config.resources.nodes < self._whole_config.resources.nodes:
                    self._checkpointer.finish()
                    check_for_more(self._whole_config, self.config, self.runtime)
            self._checkpointer.finish()
        if step < self.data.num_steps:
            self._say(f"the run ends after step {step}: {self._early_stopping.reason}")
        seconds = time.perf_counter() - start
        self._run.events.append(
            "finished", step, fsync=True, seconds=seconds, reason=self._early_stopping.reason
        )
        return train_result(self._run)

    # ------------------------------------------------------------------ the algorithm

    def step(self, step: int, stages: Stages) -> StepRecord:
        """One step of the algorithm: sample and score, estimate advantages, update, hand over the weights."""
        with stages.stage("gen"):
            record = self.collector.collect(step)
        if len(record.batch):
            record = replace(record, learned=self.learner.learn(record.batch, step, stages))
        with stages.stage("update_weights"):  # also without samples: the version is the step
            self.roles.sync.update(step)
        return record

    # ------------------------------------------------------------------ around it

    def _fit_memory(self) -> None:
        """Take over token budgets of earlier starts, and rehearse the longest batch."""
        hold_budgets(self.roles.with_models(), self.config.engines, self._run)
        if is_rehearsed(self.config.trainer, self.config.resources.device):
            with activity("the rehearsal of the longest batch"):
                rehearse_roles(self.config, self.roles, self._run, self._start_step, self._say)
            self._report_halvings(self._start_step)

    def _report_halvings(self, step: int) -> dict[str, float]:
        settings = {role: (f"{role}.engine", engine) for role, engine in self.config.engines.items()}
        return report_halvings(self.roles.with_models(), settings, self._run, step, self._say)

    def _preflight(self) -> None:
        """Run the preflight; it may refuse the run."""
        if self.config.trainer.preflight and not self.config.trainer.skip_rollout:
            preflight_before_training(
                self.config,
                self.data,
                self.roles,
                self._run,
                self._say,
                undecided=self._undecided,
                force=self._force,
            )

    def _health_monitor(self) -> HealthMonitor:
        """Health rules over the metrics, with the metrics and findings of earlier starts of the run."""
        file = self._run.path / METRICS_FILE
        earlier = read_metrics(file) if self._start_step and file.is_file() else []
        before = [metrics for metrics in earlier if metrics["step"] <= self._start_step]
        reported = [event["name"] for event in self._run.events.read("health")]
        return HealthMonitor(reported=reported, earlier=before)

    def _start_roles(self, stack: ExitStack) -> None:
        checkpoint = None if self._checkpoint is None else self._checkpoint.path
        config, runtime = start_elastic_runtime(
            self._whole_config, log_dir=self._run.path / "logs", say=self._say
        )
        self.config, self.runtime = config, stack.enter_context(runtime)
        settings = rollout_settings(
            config,
            version=self._start_step,
            samples=self._run.samples.folder if self._saves_samples else None,
            logs=self._run.path / "logs",
            is_replayed=self._recorded is not None and bool(self._recorded.steps),
        )
        self.roles: WorkerGroups = make_worker_groups(
            config,
            self.runtime,
            settings,
            num_steps=self.data.num_steps,
            checkpoint=checkpoint,
            optimizer=optimizer_of(self._run, self._checkpoint),
            costs=self._costs,
        )
        if self.roles.workers is not None:
            self.roles.workers.observe = self._note_worker
        facts = None if self._checkpoint is None else self._checkpoint.manifest.facts
        self.learner = Learner(config, self.roles, facts)
        sampling = sampling_of(config, config.rollout, self.data.tokenizer)
        self.collector = make_collector(
            config,
            self._run,
            self.data,
            self.roles,
            sampling,
            start_step=self._start_step,
            recorded={} if self._recorded is None else self._recorded.steps,
        )
        self._checkpointer = checkpointer(config.run)(
            self._run,
            self.roles.trained(),
            settings=config.run,
            tokenizer=self.data.tokenizer,
            source_model=Path(config.model.path),
            sampler=self.data.sampler,
            texts=self.collector.state_files,
            say=self._say,
            limit_s=config.resources.call_timeout_s,
            on_sealed=self._callbacks.on_save,
        )
        stack.callback(self._checkpointer.finish_background)
        for line in [*describe_collector(config), *self.collector.restore(checkpoint)]:
            self._say(line)

    def _run_step(self, step: int, stages: Stages, trackers: TrackerGroup) -> None:
        """One step with its records, validation and checkpoint."""
        if self.roles.workers is not None:
            self.roles.workers.begin_step(step)
        record = self.step(step, stages)
        self._record(record)
        self._undecided.observe(step, record.reports)
        batch = None
        if record.learned is not None and (self.data.sampler.wants_batch or self.data.growth is not None):
            batch = record.learned.batch.for_sampler(self.data.train.prompt)
        if self.data.sampler.sees_results:
            self.data.sampler.record(step, row_results(record.reports, step=step), batch)
        metrics = step_metrics(
            record, stages, self.roles, epoch=self.data.sampler.epoch, limits=self.config.data
        )
        if self.data.growth is not None:
            metrics |= self.data.growth.after(step, batch)
        log_failures(record, self.roles, self._run, self._say, timeout_s=self.config.reward.timeout_s)
        metrics |= self._report_halvings(step)
        stop_reason = self._callbacks.on_step_end(self._run, step, metrics) or self._nothing_left()
        is_last, is_new_best, score = self._early_stopping.check(step, stop_reason=stop_reason), False, None
        if self.data.val_prompts and (is_last or is_due(step, self.config.eval.every)):
            with stages.stage("testing"):
                validation = self._validate(step)
            score = validation.score
            is_last = self._early_stopping.check_validation(validation.pass_rate) or is_last
            is_new_best = self.config.run.keep_best > 0 < self.config.run.save_every and is_best(
                self._run, score
            )
            metrics |= validation.metrics
        metrics |= measure.timing_metrics(
            {**stages.seconds, "step": stages.total()},
            num_response_tokens=record.num_response_tokens,
            num_total_tokens=record.num_tokens,
        )
        for finding in self._health.observe(metrics):
            self._run.events.append("health", step, name=finding.name, message=finding.message)
            self._say(f"step {step}: {finding.message}")
        self._run.events.append(
            "step", step, seconds=stages.total(), phases=stages.seconds, waits=dict(record.waits)
        )
        trackers.log(step, metrics)  # before the checkpoint: what it holds was logged
        self._has_saved = is_last or is_new_best or is_due(step, self.config.run.save_every)
        if self._has_saved:
            with stages.stage("save_checkpoint"):
                self._checkpointer.save(step, score, facts=self._facts(), is_last=is_last)
            trackers.log(step, {measure.TIMING.of("save_checkpoint"): stages.seconds["save_checkpoint"]})
        self._checkpointer.poll()

    def _nothing_left(self) -> str:
        """Reason to end the run where no prompt is visited any more; empty while one is."""
        if not self.data.sampler.is_exhausted or self.collector.num_ahead:
            return ""
        or_long = " or is longer than data.max_prompt_tokens" if self.config.data.streaming else ""
        return (
            "every prompt was solved by all its samples and is retired (algorithm.filter_groups.retire_solved)"
            f"{or_long}, so there is nothing left to learn from these prompts"
        )

    def _wants_first_validation(self) -> bool:
        """True when the validation before training is on and no earlier start has made it."""
        is_enabled = self.config.eval.before_train and bool(self.data.val_prompts)
        return is_enabled and not self._run.events.read("validation")

    @property
    def _saves_samples(self) -> bool:
        return self.config.run.save_samples and self._run.samples is not None

    def _validate(self, step: int) -> Validation:
        """Answers on the held-out prompts, with their records."""
        sampling = sampling_of(self.config, self.config.eval, self.data.tokenizer)
        episodes = self.roles.run_episodes(
            self.data.val_prompts, self.config.eval.samples_per_prompt, sampling
        )
        check_failed_episodes(episodes.reports)
        self._undecided.observe(step, episodes.reports)
        validation = summarize_validation(episodes.reports, undecided=self._undecided.names)
        self._say(f"step {step}: validation {validation.describe()}")
        if self._saves_samples:
            decided = dict.fromkeys((r.id for r in episodes.reports), SampleDecision(None, "", ""))
            self.roles.write_samples(step, episodes, decided, split="val")
        interval = validation.interval()
        ends = {} if interval is None else dict(zip(("low", "high"), interval, strict=True))
        self._run.events.append(  # last: what it stands for was written
            "validation",
            step,
            fsync=True,
            pass_rate=validation.pass_rate,
            reward=validation.mean_reward,
            **ends,
            num_answers=validation.num_answers,
            num_unscored=validation.num_unscored,
            metrics=validation.metrics,
        )
        return validation

    def _note_worker(self, kind: str, step: int, message: str) -> None:
        """A rollout worker was lost, or has joined the others."""
        self._run.events.append(kind, step, message=message)
        self._say(f"step {step}: {message}")

    def _record(self, record: StepRecord) -> None:
        """Write fates, samples and fingerprint of a step."""
        fates, advantages = record.fates(), record.advantages()
        self._run.ledger.settle(record.step, fates)
        if self._saves_samples:
            decided = {
                name: SampleDecision(advantages.get(name), fate.name, fate.reason)
                for name, fate in fates.items()
            }
            rows = None if record.learned is None else record.learned.batch
            self.roles.write_samples(record.step, record.episodes, decided, split="train", rows=rows)
        self._run.fingerprints.append(record.step, **record.digests(self.roles.checksums()))

    def _facts(self) -> dict[str, Any]:
        """State of the algorithm and of the curriculum for a checkpoint."""
        return {**self.learner.facts(), "curriculum": self.data.sampler.curriculum()}
