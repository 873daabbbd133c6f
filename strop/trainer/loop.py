"""The training loop: one controller process, written as the algorithm box of the paper.

`Trainer.step` is the algorithm, one line per arrow of the data-flow figure; everything around it (records,
checkpoints, validation, trackers) happens in `Trainer.run`.

Concurrency: one asyncio loop. Generation and scoring await; updates block the loop while nothing else is in
flight. All waits have a deadline in the part that waits: generation (rollout.timeout_s), scoring
(reward.timeout_s).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from strop.algorithms.reduce import Reduction, merge_metrics, metric_values
from strop.controller import InlineWorkerGroup
from strop.data.sampler import visit_uid
from strop.device import device_name
from strop.engines.model import describe_precision
from strop.protocol import DataProto, columns
from strop.rewards import RewardPool, check_failed_share, summarize
from strop.rollout.client import RolloutClient
from strop.rollout.native.engine import NativeEngine
from strop.run import Checkpoint, Fate, RunFolder
from strop.trainer import metrics as measure
from strop.trainer.checkpointing import restore_position, save_checkpoint
from strop.trainer.config import Config
from strop.trainer.experience import add_advantages, add_old_log_probs, make_batch, optimizer_batches
from strop.trainer.phases import Phases
from strop.trainer.records import advantages_by_id, sample_row, step_digests, untrained_fate
from strop.trainer.reporting import (
    Say,
    batch_metrics,
    episode_metrics,
    merge_ranks,
    no_signal,
    num_response_tokens,
    num_tokens,
)
from strop.trainer.rollouts import Episode, Rollouts
from strop.trainer.setup import (
    TrainingData,
    eval_sampling,
    load_training_data,
    set_threads,
    training_sampling,
)
from strop.trainer.trackers import TrackerGroup, TrackerSetup
from strop.trainer.validation import Validation, validate
from strop.trajectory import Prompt
from strop.workers.actor import ActorWorker
from strop.workers.reference import ReferenceWorker


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    run: Path
    steps: int
    seconds: float
    """Wall-clock time of this process; of a resumed run, since the resume."""
    pass_rate_start: float | None
    """Validation before the first step; None without validation data."""
    pass_rate_final: float | None


@dataclass(kw_only=True)
class StepRecord:
    """What one step produced, collected while it ran."""

    step: int
    phases: Phases = field(default_factory=Phases)
    prompts: list[Prompt] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    batch: DataProto | None = None
    """The trained rows, with all their columns; None when no sample was left."""
    log_probs: Tensor | None = None
    """[N] the trainer's log-probs at the start of the step, flat."""
    losses: list[float] = field(default_factory=list)
    """Loss and gradient norm of each optimizer step."""
    metrics: list[dict[str, Reduction]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Optimizer steps that were not taken, with the reason."""
    trained: set[str] = field(default_factory=set)
    """Ids of the samples of the optimizer steps that were taken."""


class Trainer:
    """One run in one process. `train` makes it and runs it."""

    def __init__(self, config: Config, run: RunFolder, *, checkpoint: Checkpoint | None, say: Say) -> None:
        self.config = config
        self._run = run
        self._say = say
        set_threads(config.resources)
        self.data: TrainingData = load_training_data(config)
        self._checkpoint = checkpoint
        self._start_step = checkpoint.step if checkpoint is not None else 0
        if checkpoint is not None:
            restore_position(run, checkpoint, self.data.sampler)
        precision = describe_precision(config.model, config.resources.device)
        for line in [*self.data.report(), config.arithmetic(), precision]:
            say(line)

    async def fit(self) -> TrainResult:
        """Train to the last step; the run folder then holds everything."""
        start = time.perf_counter()
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(RewardPool(self.config.reward))
            await self._preflight(pool)
            self._load_workers(pool)
            setup = TrackerSetup(
                folder=self._run.path, total_steps=self.data.num_steps, resume_step=self._start_step
            )
            trackers = stack.enter_context(TrackerGroup(self.config.trainer.trackers, setup))
            if self._start_step == 0 and self._wants_first_validation():
                trackers.log(0, (await self._validate(0)).metrics)
            for step in range(self._start_step + 1, self.data.num_steps + 1):
                await self._run_step(step, trackers)
            await self.engine.sleep()
        seconds = time.perf_counter() - start
        self._run.events.append("finished", self.data.num_steps, fsync=True, seconds=seconds)
        validations = {event["step"]: event["pass_rate"] for event in self._run.events.read("validation")}
        return TrainResult(
            run=self._run.path,
            steps=self.data.num_steps,
            seconds=seconds,
            pass_rate_start=validations.get(0),
            pass_rate_final=validations.get(self.data.num_steps),
        )

    # ------------------------------------------------------------------ the algorithm

    async def step(self, record: StepRecord) -> None:
        """One step of the algorithm: sample, score, estimate advantages, update, publish."""
        config, phase = self.config, record.phases.phase
        record.prompts = self._next_prompts(record.step)
        with phase("gen"):
            record.episodes = await self.rollouts.play(
                record.prompts, samples_per_prompt=config.rollout.samples_per_prompt, sampling=self._sampling
            )
        kept, rewards = self._scored(record.episodes)
        if kept:
            batch = make_batch(kept, rewards, temperature=config.rollout.temperature)
            record.batch = self._learn(batch, record)
        with phase("update_weights"):  # also after a step without samples, so that the version is the step
            await self.engine.publish(record.step)

    def _learn(self, batch: DataProto, record: StepRecord) -> DataProto:
        """Update the policy on these samples; the batch with all columns that this took."""
        algorithm, phase = self.config.algorithm, record.phases.phase
        if self._needs_old_log_probs(len(batch)):
            with phase("old_log_prob"):
                batch = batch.union(self.actor.call.compute_log_prob(batch))
            record.log_probs = columns.flat(batch.tensors()["old_log_probs"])
        if self.reference is not None:
            with phase("ref"):
                batch = batch.union(self.reference.call.compute_ref_log_prob(batch))
        with phase("adv"):
            batch = add_old_log_probs(add_advantages(batch, algorithm), algorithm)
        with phase("update_actor"):
            self._update(batch, record)
        return batch

    def _next_prompts(self, step: int) -> list[Prompt]:
        """The prompts of the next step; from here on they count as consumed."""
        visits = self.data.sampler.next()
        prompts = [self.data.train.prompt(row, visit_uid(epoch, row)) for epoch, row in visits]
        count = self.config.rollout.samples_per_prompt
        self._run.ledger.issue(step, [f"{prompt.uid}/{i}" for prompt in prompts for i in range(count)])
        return prompts

    def _scored(self, episodes: Sequence[Episode]) -> tuple[list[Episode], list[float]]:
        """Episodes that can be trained on, with their rewards; too many failures end the run."""
        outcomes = [episode.outcome for episode in episodes if episode.outcome is not None]
        reward = self.config.reward
        check_failed_share(outcomes, max_failed_share=reward.max_failed_share, timeout_s=reward.timeout_s)
        kept, rewards = [], []
        for episode in episodes:
            if episode.trajectory is None or episode.outcome is None or not any(episode.trajectory.sampled):
                continue
            if episode.score is not None or reward.on_error == "zero":
                kept.append(episode)
                rewards.append(0.0 if episode.score is None else episode.score)
        return kept, rewards

    def _needs_old_log_probs(self, num_samples: int) -> bool:
        """With one optimizer step on the whole batch, the log-probs of that very pass are the old ones."""
        return self.config.samples_per_update < num_samples or self.config.actor.epochs > 1

    def _update(self, batch: DataProto, record: StepRecord) -> None:
        """Every optimizer step of the batch."""
        config = self.config
        for mini_batch in optimizer_batches(
            batch, config.algorithm, samples_per_update=config.samples_per_update, epochs=config.actor.epochs
        ):
            result = self.actor.call.update_policy(mini_batch)
            seen = merge_ranks(result.meta_info["metrics"])
            record.metrics.append(seen)
            record.losses += [
                value.value for key, value in seen.items() if key in ("actor/loss", "actor/grad_norm")
            ]
            if result.meta_info["skipped"]:
                record.skipped.append(result.meta_info["skipped"])
            else:
                record.trained.update(mini_batch.non_tensor_batch["id"])
            if record.log_probs is None:
                record.log_probs = columns.flat(result.tensors()["log_probs"])

    # ------------------------------------------------------------------ around it

    async def _preflight(self, pool: RewardPool) -> None:
        """Try the reward function on a few rows: their right answer, and no answer."""
        rows = self.data.train.row_numbers[:2]
        prompts = [self.data.train.prompt(row, visit_uid(0, row)) for row in rows]
        answers = [
            p.ground_truth if isinstance(p.ground_truth, str) else str(p.ground_truth) for p in prompts
        ]
        outcomes = await pool.preflight([*prompts, *prompts], [*answers, *["" for _ in prompts]])
        if any(outcome.kind != "score" for outcome in outcomes):
            self._say(f"reward preflight: {summarize(outcomes, timeout_s=self.config.reward.timeout_s)}")

    def _load_workers(self, pool: RewardPool) -> None:
        config = self.config
        device = device_name(config.resources.device)
        checkpoint = None if self._checkpoint is None else self._checkpoint.path
        self.actor = InlineWorkerGroup(
            lambda: ActorWorker(
                config.model,
                config.actor,
                config.algorithm,
                device=device,
                num_updates=self.data.num_steps * config.updates_per_step,
                checkpoint=checkpoint,
            )
        )
        self.reference = None
        if config.algorithm.use_kl_loss:
            self.reference = InlineWorkerGroup(
                lambda: ReferenceWorker(config.model, config.reference, device=device)
            )
        policy = self.actor.workers[0].engine.model  # generation uses the actor's own parameters
        self.engine = NativeEngine(policy, max_running=config.rollout.max_running, version=self._start_step)
        client = RolloutClient(self.engine, timeout_s=config.rollout.timeout_s)
        self.rollouts = Rollouts(client, pool, self.data.tokenizer, seed=config.trainer.seed)
        self._sampling = training_sampling(config, self.data.tokenizer)

    async def _run_step(self, step: int, trackers: TrackerGroup) -> None:
        """One step with its records, validation and checkpoint."""
        record = StepRecord(step=step)
        try:
            await self.step(record)
        except BaseException as error:
            stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
            kind = "interrupted" if stopped else "crashed"
            reason = f"{type(error).__name__}: {error}"
            self._run.events.append(kind, step, fsync=True, phase=record.phases.current, error=reason)
            raise
        self._write(record)
        numbers = self._metrics(record)
        self._warn(record, numbers)
        is_last = step == self.data.num_steps
        score = None
        if self.data.val_prompts and (is_last or _is_due(step, self.config.eval.every)):
            with record.phases.phase("testing"):
                validation = await self._validate(step)
            score = validation.pass_rate
            numbers |= validation.metrics
        numbers |= measure.timing_metrics(
            {**record.phases.seconds, "step": record.phases.total()},
            num_response_tokens=num_response_tokens(record.episodes),
            num_total_tokens=num_tokens(record.episodes),
        )
        self._run.events.append("step", step, seconds=record.phases.total(), phases=record.phases.seconds)
        trackers.log(step, numbers)  # before the checkpoint: what it holds was logged
        if is_last or _is_due(step, self.config.run.save_every):
            with record.phases.phase("save_checkpoint"):
                self._save(step, score)
            trackers.log(step, {"timing_s/save_checkpoint": record.phases.seconds["save_checkpoint"]})

    def _wants_first_validation(self) -> bool:
        """False also when a start that came no further than this left one behind."""
        wanted = self.config.eval.before_train and bool(self.data.val_prompts)
        return wanted and not self._run.events.read("validation")

    async def _validate(self, step: int) -> Validation:
        """Answers on the held-out prompts, with their records."""
        validation = await validate(
            self.rollouts,
            self.data.val_prompts,
            self.config.eval,
            eval_sampling(self.config, self.data.tokenizer),
        )
        if self.config.run.save_samples:
            rows = [
                self._row(episode, None, Fate("filtered", "validation")) for episode in validation.episodes
            ]
            self._run.samples.write(step, rows, split="val")
        low, high = validation.interval()
        self._run.events.append(  # last: what it stands for was written
            "validation",
            step,
            fsync=True,
            pass_rate=validation.pass_rate,
            low=low,
            high=high,
            num_answers=validation.num_answers,
            num_unscored=validation.num_unscored,
            metrics=validation.metrics,
        )
        return validation

    def _write(self, record: StepRecord) -> None:
        """Fates, samples and fingerprint of a step."""
        advantages = {} if record.batch is None else advantages_by_id(record.batch)
        skipped = dict.fromkeys(advantages, record.skipped[0] if record.skipped else "")
        fates = {
            e.id: Fate("trained")
            if e.id in record.trained
            else untrained_fate(e, skipped=skipped.get(e.id, ""))
            for e in record.episodes
        }
        self._run.ledger.settle(record.step, fates)
        if self.config.run.save_samples:
            rows = [self._row(e, advantages.get(e.id), fates[e.id]) for e in record.episodes]
            self._run.samples.write(record.step, rows)
        weights = self.actor.workers[0].checksum()
        digests = step_digests(
            [prompt.uid for prompt in record.prompts],
            record.batch,
            log_probs=record.log_probs,
            losses=record.losses,
            weights=weights,
        )
        self._run.fingerprints.append(record.step, **digests)

    def _row(self, episode: Episode, advantage: float | None, fate: Fate) -> dict[str, Any]:
        text = self.data.tokenizer.decode(episode.prompt.token_ids)
        return sample_row(episode, prompt_text=text, advantage=advantage, fate=fate)

    def _save(self, step: int, score: float | None) -> None:
        save_checkpoint(
            self._run,
            step,
            self.actor.call.save_checkpoint,
            tokenizer=self.data.tokenizer,
            source_model=Path(self.config.model.path),
            sampler=self.data.sampler,
            score=score,
        )

    def _metrics(self, record: StepRecord) -> dict[str, float]:
        """All numbers of a step that do not depend on what follows it."""
        numbers = {
            "training/global_step": float(record.step),
            "training/epoch": float(self.data.sampler.epoch),
            **metric_values(merge_metrics(record.metrics)),
            **episode_metrics(record.episodes, self.config),
            **measure.throughput_metrics(
                num_total_tokens=num_tokens(record.episodes), step_s=record.phases.total(), num_devices=1
            ),
        }
        generated, gen_s = num_response_tokens(record.episodes), record.phases.seconds.get("gen", 0.0)
        if gen_s > 0:
            numbers["rollout/tokens_per_s"] = generated / gen_s
        if record.batch is not None and record.log_probs is not None:
            numbers |= batch_metrics(record.batch, record.log_probs)
        return numbers

    def _warn(self, record: StepRecord, numbers: dict[str, float]) -> None:
        """Say at once what a person would otherwise find out after hours."""
        for reason in record.skipped:
            self._run.events.append("skipped_update", record.step, reason=reason)
            self._say(f"step {record.step} skipped an update: {reason}")
        failed = [e for e in record.episodes if e.trajectory is None]
        if failed:
            self._say(
                f"step {record.step}: {len(failed)} of {len(record.episodes)} episodes failed; the first one, "
                f"{failed[0].id}: {failed[0].failure}"
            )
        outcomes = [e.outcome for e in record.episodes if e.outcome is not None]
        if any(outcome.kind != "score" for outcome in outcomes):
            self._say(f"step {record.step}: {summarize(outcomes, timeout_s=self.config.reward.timeout_s)}")
        warning = no_signal(numbers, self.config) if record.step == self._start_step + 1 else ""
        if warning:
            self._run.events.append("no_signal", record.step, message=warning)
            self._say(f"{warning} (`strop samples {self._run.path} --step {record.step}`)")


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def train(config: Config, run: RunFolder, *, checkpoint: Checkpoint | None = None, say: Say) -> TrainResult:
    """Run a training to its end in this process.

    Args:
        config: the resolved configuration.
        run: a fresh run folder, or one rolled back to `checkpoint`.
        checkpoint: where to continue.
        say: takes lines for the person who watches.
    """
    return asyncio.run(Trainer(config, run, checkpoint=checkpoint, say=say).fit())
