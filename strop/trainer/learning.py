"""From scored samples to new weights: one line per arrow of the data-flow figure.

Every call hands references from role to role; nothing here looks at a token. A phase ends when its workers
have computed, so its time is theirs, whether or not they are in this process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strop.algorithms.kl_control import KlController
from strop.algorithms.reduce import Reduction
from strop.controller import Cut, WorkerGroup, as_batch, as_future
from strop.protocol import DataProto, DataProtoFuture
from strop.trainer.config import Config
from strop.trainer.experience import NAMES, Experience, optimizer_batches
from strop.trainer.phases import Phases
from strop.trainer.reporting import merge_ranks
from strop.trainer.resampling import SCORE_COLUMNS, draw_metrics, drawn_rows, sample_scores
from strop.trainer.roles import Roles
from strop.trajectory import Prompt
from strop.workers.actor import ActorWorker
from strop.workers.critic import CriticWorker
from strop.workers.played import Played
from strop.workers.reports import EpisodeReport, check_versions
from strop.workers.summary import BatchSummary
from strop.workers.teacher import TeacherWorker


@dataclass(kw_only=True)
class StepRecord:
    """What one step produced, collected while it ran."""

    step: int
    phases: Phases = field(default_factory=Phases)
    prompts: list[Prompt] = field(default_factory=list)
    played: list[Played] = field(default_factory=list)
    """The samples of each round of generation."""
    experience: Experience | None = None
    """The trained rows with all their columns; None when no sample was left."""
    summary: BatchSummary | None = None
    """Of those rows."""
    losses: list[float] = field(default_factory=list)
    """Loss and gradient norm of each optimizer step, the critic's first."""
    metrics: list[dict[str, Reduction]] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    """Metrics that are numbers already."""
    skipped: list[str] = field(default_factory=list)
    """Optimizer steps that were not taken, with the reason."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Uids of the groups that dynamic sampling left out, with the cause."""
    rejected: set[str] = field(default_factory=set)
    """Ids of the samples of which rollout correction left no token."""
    not_drawn: set[str] = field(default_factory=set)
    """Ids of the samples that resampling left out."""
    trained: set[str] = field(default_factory=set)
    """Ids of the samples of the optimizer steps that were taken."""

    @property
    def reports(self) -> list[EpisodeReport]:
        """Of all samples that were played."""
        return [report for played in self.played for report in played.reports]


class Learner:
    """Updates critic and policy; holds what the algorithm carries from step to step."""

    def __init__(self, config: Config, roles: Roles, kl: KlController) -> None:
        self._config = config
        self._roles = roles
        self.kl = kl
        """Coefficient of the KL penalty in the reward."""

    def learn(self, experience: Experience, record: StepRecord) -> None:
        """One step of the algorithm on these samples; `record` gets everything that came of it.

        Raises:
            StaleSamples: some are of an older policy, and no correction is on.
        """
        config, roles, phase = self._config, self._roles, record.phases.phase
        check_versions(
            experience.reports, record.step - 1, is_corrected=config.algorithm.correction.is_on
        )  # the version is the number of steps done
        actor, critic = roles.actor, roles.critic
        if roles.reward_model is not None:
            with phase("reward_model"), roles.turn("reward_model"):
                scores = roles.reward_model.call.compute_rm_score(rows(experience, roles.reward_model))
                experience = experience.union(done(scores), "rm_scores")
        has_log_probs = self._needs_old_log_probs(len(experience.sample_starts))
        if has_log_probs:
            with phase("old_log_prob"), roles.turn("actor"):
                log_probs = actor.call.compute_log_prob(rows(experience, actor))
                experience = experience.union(done(log_probs), "old_log_probs", "entropys")
        if config.needs("sum_pi_squared"):
            with phase("sum_pi_squared"), roles.turn("actor"):
                sums = actor.call.compute_sum_pi_squared(rows(experience, actor))
                experience = experience.union(done(sums), "sum_pi_squared")
        if config.algorithm.correction.is_on:
            with phase("correction"):
                experience = self._correct(experience, record)
        if config.uses_reference:
            with phase("ref"), roles.turn("reference"):
                experience = experience.union(done(self._reference_log_probs(experience)), "ref_log_prob")
        if critic is not None:
            with phase("values"), roles.turn("critic"):
                values = critic.call.compute_values(rows(experience, critic))
                experience = experience.union(done(values), "values")
        with phase("adv"):
            advantages = actor.call.compute_advantages(as_batch(experience.light()), kl_coef=self.kl.value)
            experience = experience.union(done(advantages), "advantages", "returns", "token_level_rewards")
        trained = experience if config.algorithm.resampling == "none" else self._drawn(experience, record)
        if critic is not None:
            with phase("update_critic"), roles.turn("critic"):
                self._update_critic(critic, trained, record)
        if record.step > config.trainer.critic_warmup:
            if roles.teacher is not None and len(trained):
                with phase("teacher"), roles.turn("teacher"):
                    trained = self._taught(roles.teacher, trained)
            with phase("update_actor"), roles.turn("actor"):
                kept = self._update_actor(actor, trained, record, keeps=not has_log_probs)
            if kept is not None:
                experience = experience.union(kept, "log_probs")
        with phase("summary"):
            record.summary = actor.call.summarize_batch(as_batch(experience.rows.select(None, list(NAMES))))
        record.experience = experience
        self._control_kl(record)

    def _correct(self, experience: Experience, record: StepRecord) -> Experience:
        """Rejected tokens leave the loss and its denominators; the others may get weights."""
        made = done(self._roles.actor.call.correct_rollout(as_batch(experience.light())))
        counted = made.select(["num_trained"]).get()
        record.numbers |= counted.meta_info["numbers"]
        counts = tuple(int(count) for count in counted.tensors()["num_trained"])
        record.rejected = {r.id for r, count in zip(experience.reports, counts, strict=True) if not count}
        names = ["loss_mask"]
        if self._config.algorithm.correction.weights != "none":
            names.append("rollout_is_weights")
        return replace(experience.union(made.select(names), *names), num_trained=counts)

    def _drawn(self, experience: Experience, record: StepRecord) -> Experience:
        """The rows that are trained on, drawn by their scores; one that was drawn twice is there twice.

        Rows of which a correction left no token cannot be drawn.
        """
        usable = experience.take([row for row, count in enumerate(experience.num_trained) if count])
        if not len(usable):
            return usable
        names = [name for name in SCORE_COLUMNS if name in usable.column_names]
        scores = sample_scores(usable.rows.select(names).get())
        drawn = drawn_rows(
            scores,
            [report.uid for report in usable.reports],
            self._config.algorithm,
            seed=self._config.trainer.seed,
            step=record.step,
        )
        record.numbers |= draw_metrics(scores, drawn)
        trained = usable.take(drawn)
        record.not_drawn = {r.episode_id for r in usable.reports} - {r.episode_id for r in trained.reports}
        return trained

    def _reference_log_probs(self, experience: Experience) -> DataProto:
        """By the frozen model, or by the policy without its adapter."""
        reference, actor = self._roles.reference, self._roles.actor
        if reference is None:
            return actor.call.compute_ref_log_prob(rows(experience, actor))
        return reference.call.compute_ref_log_prob(rows(experience, reference))

    def _taught(self, teacher: WorkerGroup[TeacherWorker], trained: Experience) -> Experience:
        """With what the teacher says, which the update alone reads: for a forward KL, top_k numbers per token."""
        if self._config.algorithm.distillation.kind == "reverse_kl":
            log_probs = teacher.call.compute_teacher_log_prob(rows(trained, teacher))
            return trained.union(done(log_probs), "teacher_log_prob")
        most_likely = teacher.call.compute_teacher_top_k(rows(trained, teacher))
        return trained.union(done(most_likely), "teacher_ids", "teacher_logprobs")

    def _needs_old_log_probs(self, num_samples: int) -> bool:
        """With one optimizer step on the whole batch, the log-probs of that very pass are the old ones."""
        config = self._config
        return (
            config.samples_per_update < num_samples
            or config.actor.epochs > 1
            or config.algorithm.use_kl_in_reward
            or config.trainer.critic_warmup > 0
            or config.algorithm.correction.is_on
            or config.algorithm.resampling != "none"
            or config.needs("old_log_probs")
        )

    def _update_critic(
        self, critic: WorkerGroup[CriticWorker], experience: Experience, record: StepRecord
    ) -> None:
        """Every optimizer step of the critic."""
        config = self._config
        for part in optimizer_batches(
            experience, samples_per_update=config.critic_samples_per_update, epochs=config.critic.epochs
        ):
            if not part.totals().num_tokens:
                continue
            result = critic.call.update_critic(rows(part, critic), part.totals())
            self._take_note(result, part, record, role="critic")

    def _update_actor(
        self, actor: WorkerGroup[ActorWorker], experience: Experience, record: StepRecord, *, keeps: bool
    ) -> DataProtoFuture | None:
        """Every optimizer step of the policy.

        With `keeps`, the log-probs of the (only) pass over the rows come back, from before its step.
        """
        config = self._config
        kept: list[DataProtoFuture] = []
        for part in optimizer_batches(
            experience, samples_per_update=config.samples_per_update, epochs=config.actor.epochs
        ):
            if not part.totals().num_tokens:
                record.skipped.append("rollout correction rejected every token of it")
                continue
            cut = part.cut(actor.mesh)
            result = actor.call.update_policy(as_batch(cut), part.totals(), keep_log_probs=keeps)
            self._take_note(result, part, record, role="actor")
            if keeps:
                own = done(actor.call.kept_log_probs())
                kept.append(own.take(_callers_order(cut)) if isinstance(cut, Cut) else own)
        return DataProtoFuture.concat(kept) if kept else None

    def _take_note(self, result: DataProto, part: Experience, record: StepRecord, *, role: str) -> None:
        """Metrics of one optimizer step, and whose samples it was."""
        seen = merge_ranks(result.meta_info["metrics"])
        record.metrics.append(seen)
        values = {key: reduction.value for key, reduction in seen.items()}
        record.losses += [values[f"{role}/loss"], values[f"{role}/grad_norm"]]
        if result.meta_info["skipped"]:
            record.skipped.append(result.meta_info["skipped"])
        else:
            record.trained.update(
                report.episode_id for report in part.reports if report.id not in record.rejected
            )

    def _control_kl(self, record: StepRecord) -> None:
        """Move the coefficient of the KL penalty towards its target."""
        assert record.summary is not None, "made after the batch was summarized"
        if self._config.algorithm.use_kl_in_reward:
            record.numbers["actor/reward_kl_penalty_coeff"] = self.kl.value
            kl = record.summary.metrics["actor/reward_kl_penalty"]
            self.kl.update(kl, len(record.summary.advantages))


def _callers_order(cut: Cut) -> NDArray[np.int64]:
    """Where each row of the batch lies among the rows of the parts, one after another."""
    return np.argsort(np.concatenate(cut.parts))


def rows(experience: Experience, group: WorkerGroup[Any]) -> DataProto:
    """The rows as an argument for this group."""
    return as_batch(experience.cut(group.mesh))


def done(result: DataProto) -> DataProtoFuture:
    """The result of a non-blocking call, computed but not fetched."""
    return as_future(result).wait()
