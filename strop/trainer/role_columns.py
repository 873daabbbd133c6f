"""Columns that roles add to the rows of a step, each by one call of a worker group, in the order of a step.

Rows stay with the workers: a call gives references to its columns, which the next one hands on. The table of columns
(`protocol.schema`) says which stage makes a column; what a run needs follows from its estimator, loss and correction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from strop.config.sections import where_on
from strop.controller import Worker, WorkerGroup
from strop.protocol.schema import made_by
from strop.trainer.config import Config
from strop.trainer.rollout_batch import RolloutBatch
from strop.trainer.timing import Stages
from strop.trainer.worker_groups import WorkerGroups

W = TypeVar("W", bound=Worker)


def add_columns(
    batch: RolloutBatch, names: Collection[str], config: Config, groups: WorkerGroups, stages: Stages
) -> RolloutBatch:
    """The batch with the wanted columns of models and of the rollout correction; a call may add others beside them.

    Args:
        batch: columns that it has are not made again.
        names: columns of `protocol.schema`, those of advantages aside.
        config, groups, stages: of the run, and of the step.

    Raises:
        ValueError: the run has no role that makes one of them.
    """
    missing = set(names) - batch.column_names
    if missing & made_by("reward_model"):
        reward_model = _started(groups.reward_model, "reward_model")
        with stages.stage("reward_model", "reward_model"):
            scores = reward_model.call.compute_rm_score(batch.partition(reward_model.mesh))
            batch = batch.union(scores, "rm_scores", "rm_cut_tokens")
    if missing & made_by("old_log_prob"):
        with stages.stage("old_log_prob", "actor"):
            log_probs = groups.actor.call.compute_log_prob(batch.partition(groups.actor.mesh))
            squares = ["sum_pi_squared"] if config.needs("sum_pi_squared") else []
            batch = batch.union(log_probs, "old_log_probs", "entropys", *squares)
    if missing & made_by("correction"):
        with stages.stage("correction"):
            corrected = groups.actor.call.correct_rollout(batch.columns_for("advantages"))
            batch = _counted(batch.union(corrected, *config.algorithm.correction.columns))
    if missing & made_by("ref"):
        reference = groups.reference or groups.actor  # the policy without its adapter
        with stages.stage("ref", "reference"):
            log_probs = reference.call.compute_ref_log_prob(batch.partition(reference.mesh))
            batch = batch.union(log_probs, "ref_log_prob")
    if missing & made_by("values"):
        critic = _started(groups.critic, "critic")
        with stages.stage("values", "critic"):
            batch = batch.union(critic.call.compute_values(batch.partition(critic.mesh)), "values")
    if missing & made_by("prm_ref"):
        prm = _started(groups.prm, "prm")
        with stages.stage("prm_ref", "prm"):
            log_probs = prm.call.compute_prm_ref_log_prob(batch.partition(prm.mesh))
            batch = batch.union(log_probs, "prm_ref_log_prob")
    if missing & made_by("prm"):
        prm = _started(groups.prm, "prm")
        with stages.stage("prm", "prm"):
            rewards = prm.call.compute_process_rewards(batch.partition(prm.mesh))
            batch = batch.union(rewards, "process_rewards")
    if missing & made_by("teacher"):
        teacher = _started(groups.teacher, "teacher")
        with stages.stage("teacher", "teacher"):
            targets = teacher.call.compute_teacher(batch.partition(teacher.mesh))
            batch = batch.union(targets, *config.algorithm.distillation.columns)
    return batch


def columns_before_updates(config: Config, num_samples: int) -> frozenset[str]:
    """Columns that `add_columns` makes before the updates of a step of so many samples."""
    needed: set[str] = set()
    if "reward_model" in config.roles:
        needed.add("rm_scores")
    if _needs_old_log_probs(config, num_samples):
        needed |= {"old_log_probs", "entropys"}
    if correction := where_on(config.algorithm.correction):
        needed |= set(correction.columns)
    if config.uses_reference:
        needed.add("ref_log_prob")
    if "critic" in config.roles:
        needed.add("values")
    if "prm" in config.roles:
        needed |= {"prm_ref_log_prob", "process_rewards"}
    return frozenset(needed)


def _needs_old_log_probs(config: Config, num_samples: int) -> bool:
    """False with one optimizer step on the whole batch, where the log-probs of that very pass are the old ones."""
    return (
        config.samples_per_update(config.actor) < num_samples
        or config.actor.epochs > 1
        or config.penalizes_kl
        or config.trainer.critic_warmup > 0
        or where_on(config.algorithm.correction) is not None
        or config.chooses_samples
        or config.needs("old_log_probs")
        or config.needs("sum_pi_squared")
    )


def _started(group: WorkerGroup[W] | None, name: str) -> WorkerGroup[W]:
    """The group of a role.

    Raises:
        ValueError: the run has no such role.
    """
    if group is None:
        raise ValueError(f"this run has no {name}, so there is nobody to compute its columns")
    return group


def _counted(batch: RolloutBatch) -> RolloutBatch:
    """The batch after a correction: rejected tokens leave the loss and its denominators."""
    counted = batch.rows.select(["num_trained"], []).get()
    numbers: Mapping[str, float] = counted.meta_info["numbers"]
    counts = tuple(int(count) for count in counted.tensors()["num_trained"])
    return replace(batch, num_trained=counts, metrics={**batch.metrics, **numbers})
