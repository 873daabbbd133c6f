"""Update of a step, from scored samples to new weights: log-probs and values, advantages, optimizer steps.

`Learner.learn` is the algorithm of a step; role_columns.py has the calls of worker groups that add columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from strop.algorithms.aggregation import BatchTotals
from strop.algorithms.batch_metrics import REWARD_KL, Metrics
from strop.algorithms.kl_controller import REWARD_KL_COEF, kl_controller
from strop.controller import WorkerGroup, as_list
from strop.protocol import DataProto
from strop.protocol.schema import object_columns_for
from strop.trainer.config import Config
from strop.trainer.role_columns import add_columns, columns_before_updates
from strop.trainer.rollout_batch import RolloutBatch, optimizer_batches
from strop.trainer.sample_selection import chosen
from strop.trainer.timing import Stages
from strop.trainer.worker_groups import WorkerGroups
from strop.workers.actor import ActorWorker
from strop.workers.critic import CriticWorker
from strop.workers.prm import PrmWorker
from strop.workers.reports import check_versions
from strop.workers.rows import Update, merged_update
from strop.workers.summary import BatchSummary

REJECTED = "rollout correction rejected every token of it"
"""Reason of a filtered sample."""


@dataclass(frozen=True, kw_only=True)
class LearnerResult:
    """Result of the algorithm on the samples of one step."""

    batch: RolloutBatch
    """All rows with all their columns."""
    summary: BatchSummary
    """Summary of these rows."""
    steps: tuple[Update, ...]
    """Optimizer steps of the step, the policy's last."""
    left_out: Mapping[str, str]
    """Reasons of samples that were not drawn, or not kept, by id."""
    metrics: Mapping[str, float]
    """Numbers that are no metric of an optimizer step."""

    @property
    def rejected(self) -> frozenset[str]:
        """Ids of the rows of which rollout correction left no token."""
        counted = zip(self.batch.reports, self.batch.num_trained, strict=True)
        return frozenset(report.id for report, count in counted if not count)

    @property
    def trained(self) -> frozenset[str]:
        """Ids of the samples of the optimizer steps that were taken."""
        return frozenset(name for step in self.steps for name in step.trained)


class Learner:
    """Updates the policy, the critic and the process reward model; holds what the algorithm carries between steps."""

    def __init__(self, config: Config, groups: WorkerGroups, facts: Mapping[str, Any] | None) -> None:
        """`facts` are those of the checkpoint that the run goes on from (method `facts`); None where it starts."""
        self._config = config
        self._groups = groups
        self._kl_controller = kl_controller(config.algorithm.kl_ctrl)
        if facts is not None:
            self._kl_controller.load_state(facts.get("kl", {}))

    def facts(self) -> dict[str, Any]:
        """State of the algorithm for a checkpoint."""
        return {"kl": self._kl_controller.state()}

    def learn(self, batch: RolloutBatch, step: int, stages: Stages) -> LearnerResult:
        """Run one step of the algorithm on these samples.

        Raises:
            StaleSamples: some are of an older policy, and no correction is on.
        """
        config, groups = self._config, self._groups
        check_versions(batch.reports, step - 1, is_corrected=config.algorithm.corrects_for_age)
        updates = list[Update]()
        if groups.prm is not None and config.prm.update == "before":
            batch = add_columns(batch, {"prm_ref_log_prob"}, config, groups, stages)
            updates += self._update_prm(groups.prm, batch, stages)

        needed = columns_before_updates(config, len(batch.sample_starts))
        batch = add_columns(batch, needed, config, groups, stages)
        with stages.stage("adv"):
            light, kl_coef = batch.columns_for("advantages"), self._kl_controller.value
            advantages = groups.actor.call.compute_advantages(light, kl_coef=kl_coef)
            batch = batch.union(advantages, "token_level_rewards", "advantages", "returns")

        if groups.prm is not None and config.prm.update == "after":
            updates += self._update_prm(groups.prm, batch, stages)
        trained, left_out = chosen(batch, config, step) if config.chooses_samples else (batch, {})
        if groups.critic is not None:
            updates += self._update_critic(groups.critic, trained, stages)
        if step > config.trainer.critic_warmup:
            if groups.teacher is not None and len(trained):
                trained = add_columns(trained, config.algorithm.distillation.columns, config, groups, stages)
            policy_updates, log_probs = self._update_policy(groups.actor, trained, stages)
            updates += policy_updates
            if log_probs is not None and "old_log_probs" not in batch.column_names:
                batch = batch.union(log_probs, "log_probs", "entropys")

        with stages.stage("summary"):
            every_column = batch.rows.select(None, object_columns_for("advantages"))
            summary = groups.actor.call.summarize_batch(every_column, batch.sample_starts)
        return LearnerResult(
            batch=batch,
            summary=summary,
            steps=tuple(updates),
            left_out=left_out,
            metrics={**trained.metrics, **self._follow_kl(summary, len(batch.sample_starts))},
        )

    def _update_policy(
        self, actor: WorkerGroup[ActorWorker], batch: RolloutBatch, stages: Stages
    ) -> tuple[list[Update], DataProto | None]:
        """Every optimizer step of the policy, and the log-probs of the rows before their steps."""
        config, updates, log_probs = self._config, list[Update](), list[DataProto]()
        size = config.samples_per_update(config.actor)
        with stages.stage("update_actor", "actor"):
            for part in optimizer_batches(batch, samples_per_update=size, epochs=config.actor.epochs):
                totals = part.totals()
                if not totals.num_tokens:
                    updates.append(Update(role="actor", metrics={}, skipped=REJECTED))
                    continue
                rows = part.partition(actor.mesh)
                result = actor.call.update_policy(rows, totals)
                update = _on_samples(merged_update(result.metrics), part)
                updates.append(replace(update, metrics={**update.metrics, **part.balance(rows)}))
                log_probs.append(result.batch)
        return updates, log_probs[0].concat(log_probs) if log_probs else None

    def _update_critic(
        self, critic: WorkerGroup[CriticWorker], batch: RolloutBatch, stages: Stages
    ) -> list[Update]:
        """Every optimizer step of the critic."""
        config, updates = self._config, list[Update]()
        size = config.samples_per_update(config.critic)
        with stages.stage("update_critic", "critic"):
            for part in optimizer_batches(batch, samples_per_update=size, epochs=config.critic.epochs):
                totals = part.totals()
                if totals.num_tokens:
                    metrics = as_list(critic.call.update_critic(part.partition(critic.mesh), totals))
                    updates.append(_on_samples(merged_update(metrics), part))
        return updates

    def _update_prm(self, prm: WorkerGroup[PrmWorker], batch: RolloutBatch, stages: Stages) -> list[Update]:
        """Every optimizer step of the process reward model, which learns from all samples, whatever is rejected."""
        config, updates = self._config, list[Update]()
        with stages.stage("update_prm", "prm"):
            for part in optimizer_batches(
                batch, samples_per_update=config.samples_per_update(config.prm), epochs=1
            ):
                counts = [report.num_sampled_tokens for report in part.reports]
                totals = BatchTotals(num_tokens=sum(counts), num_samples=sum(count > 0 for count in counts))
                if totals.num_tokens:
                    metrics = as_list(prm.call.update_prm(part.partition(prm.mesh), totals))
                    # The fate of a sample is what the policy made of it, so there are no ids.
                    updates.append(merged_update(metrics))
        return updates

    def _follow_kl(self, summary: BatchSummary, num_samples: int) -> Metrics:
        """Move the coefficient of the KL penalty by the KL of the step; the coefficient that the step had.

        Samples count, not their rows: the horizon is one of samples, as in the libraries that have it.
        """
        if not self._config.algorithm.use_kl_in_reward:
            return {}
        used: Metrics = {REWARD_KL_COEF: self._kl_controller.value}
        self._kl_controller.update(summary.metrics[REWARD_KL], num_samples)
        return used


def _on_samples(update: Update, part: RolloutBatch) -> Update:
    """The update with the ids of the samples that it trained on, where it was taken."""
    if update.skipped:
        return update
    counted = zip(part.reports, part.num_trained, strict=True)
    return replace(update, trained=frozenset(report.episode_id for report, count in counted if count))
