"""From scored samples to new weights: the algorithm of a step, one line per arrow of the data-flow figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals
from strop.algorithms.config import KeepConfig
from strop.algorithms.kl_control import KlController
from strop.algorithms.selection import kept_samples
from strop.base.guests import needed
from strop.base.metrics import Metric, Reduction
from strop.controller import as_list
from strop.protocol import DataProto, DataProtoFuture, future_of
from strop.protocol.schema import labels_for
from strop.trainer.config import Config
from strop.trainer.experience import Experience, optimizer_batches
from strop.trainer.producers import (
    PRM_REF,
    StepContext,
    produced,
    wanted_before_updates,
    wanted_by_the_update,
)
from strop.trainer.roles import Roles
from strop.trainer.stages import Stages
from strop.workers.estimates import REWARD_KL
from strop.workers.reports import check_versions
from strop.workers.rows import Update, merged_update, updates_of
from strop.workers.summary import BatchSummary, answer_scores

REWARD_KL_COEF = Metric(
    "actor/reward_kl_penalty_coeff", "1", "factor of the KL in the reward, when there is one"
)
NOT_DRAWN = "not drawn"
"""Why a sample was filtered."""
NOT_KEPT = "not among the samples to keep"
"""As NOT_DRAWN."""
KEEP = Metric(
    "training/keep/{samples,prompts_without,score_mean}",
    "samples; prompts; reward",
    "with `algorithm.keep`: samples that are trained on, prompts that none is left of, mean score of what is trained "
    "on, where something is",
)
RESAMPLING = Metric(
    "training/resampling/{not_drawn_samples,max_draws,score_mean}",
    "samples; times; reward",
    "with PF-PPO: samples not drawn, how often the most frequent one was, mean score of what is trained on",
)
REJECTED = "rollout correction rejected every token of it"
"""As NOT_DRAWN."""


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """One optimizer step of a role."""

    role: str
    """actor, critic or prm."""
    metrics: Mapping[str, Reduction]
    """Empty where no token was left to take it with."""
    skipped: str
    """Why it was not taken; empty when it was."""
    trained: frozenset[str]
    """Ids of the samples of it, where it was taken."""

    def losses(self) -> list[float]:
        """Loss and gradient norm, where there are any."""
        names = (f"{self.role}/loss", f"{self.role}/grad_norm")
        return [self.metrics[name].value for name in names] if self.metrics else []


@dataclass(frozen=True, kw_only=True)
class LearnerResult:
    """What the samples of one step came to."""

    experience: Experience
    """All rows with all their columns."""
    summary: BatchSummary
    """Of these rows."""
    steps: tuple[OptimizerStep, ...]
    """Those of the process reward model first, then the critic's."""
    left_out: Mapping[str, str]
    """Why samples were left out, by id: those that were not drawn, or not kept."""
    metrics: Mapping[str, float]
    """Numbers that are no metric of an optimizer step."""

    @property
    def rejected(self) -> frozenset[str]:
        """Ids of the rows of which rollout correction left no token."""
        counted = zip(self.experience.reports, self.experience.num_trained, strict=True)
        return frozenset(report.id for report, count in counted if not count)

    @property
    def trained(self) -> frozenset[str]:
        """Ids of the samples of the optimizer steps that were taken."""
        return frozenset(name for step in self.steps for name in step.trained)


class Learner:
    """Updates process reward model, critic and policy; holds what the algorithm carries from step to step."""

    def __init__(self, config: Config, roles: Roles, kl: KlController) -> None:
        self._config = config
        self._roles = roles
        self.kl = kl
        """Coefficient of the KL penalty in the reward."""

    def learn(self, experience: Experience, step: int, stages: Stages) -> LearnerResult:
        """One step of the algorithm on these samples.

        Raises:
            StaleSamples: some are of an older policy, and no correction is on.
        """
        config, context = self._config, StepContext(self._config, self._roles, self.kl.value)
        check_versions(experience.reports, step - 1, is_corrected=config.algorithm.corrects_for_age)
        wanted = wanted_before_updates(config, len(experience.sample_starts))
        steps: list[OptimizerStep] = []
        if config.uses_prm and config.prm.update == "before":
            experience = produced(experience, {PRM_REF}, context, stages)
            with stages.stage("update_prm", "prm"):
                steps += self._update_prm(experience)
        experience = produced(experience, wanted, context, stages)
        if config.uses_prm and config.prm.update == "after":
            with stages.stage("update_prm", "prm"):
                steps += self._update_prm(experience)
        trained, left_out = experience, dict[str, str]()
        if config.algorithm.resampling != "none" or config.algorithm.keep.is_on:
            trained, left_out = self._chosen(experience, step)
        if config.uses_critic:
            with stages.stage("update_critic", "critic"):
                steps += self._update_critic(trained)
        if step > config.trainer.critic_warmup:
            trained = produced(trained, wanted_by_the_update(config, trained), context, stages)
            with stages.stage("update_actor", "actor"):
                taken, before = self._update_actor(trained)
            steps += taken
            if "old_log_probs" not in experience.column_names and before is not None:
                experience = experience.union(before, "log_probs", "entropys")
        with stages.stage("summary"):
            summary = self._summary(experience)
        return LearnerResult(
            experience=experience,
            summary=summary,
            steps=tuple(steps),
            left_out=left_out,
            metrics={**trained.metrics, **self._control_kl(summary)},
        )

    def _chosen(self, experience: Experience, step: int) -> tuple[Experience, dict[str, str]]:
        """The rows that are trained on, and why other samples are not; a row that was drawn twice is there twice.

        Rows of which a correction left no token cannot be chosen.
        """
        algorithm = self._config.algorithm
        usable = experience.take([row for row, count in enumerate(experience.num_trained) if count])
        if not len(usable):
            return usable, {}
        scores = answer_scores(usable.taken_by("resampling").get().tensors(), dtype=torch.float64)
        if algorithm.keep.is_on:
            chosen, reason = _kept_rows(scores, usable, algorithm.keep), NOT_KEPT
            taken = usable.take(chosen)
            metrics = _keep_metrics(scores, usable, taken, chosen)
        else:
            uids = [report.uid for report in usable.reports]
            drawn_rows = needed("resampling", f"algorithm.resampling is {algorithm.resampling}")
            chosen = drawn_rows(scores, uids, algorithm, seed=self._config.trainer.seed, step=step)
            taken = usable.take(chosen)
            metrics, reason = _draw_metrics(scores, chosen), NOT_DRAWN
        taken = replace(taken, metrics={**taken.metrics, **metrics})
        return taken, dict.fromkeys(usable.episode_ids - taken.episode_ids, reason)

    def _update_prm(self, experience: Experience) -> list[OptimizerStep]:
        """Every optimizer step of the process reward model, which learns from all samples, whatever is rejected."""
        config, prm, steps = self._config, self._roles.prm, []
        assert prm is not None, "there is one"
        for part in optimizer_batches(experience, samples_per_update=config.prm_samples_per_update, epochs=1):
            counts = [report.num_sampled_tokens for report in part.reports]
            totals = BatchTotals(num_tokens=sum(counts), num_samples=sum(count > 0 for count in counts))
            if totals.num_tokens:
                updates = as_list(prm.call.update_prm(part.partition(prm.mesh), totals))
                # What became of a sample is what the policy made of it.
                steps.append(replace(_optimizer_step("prm", updates, part), trained=frozenset()))
        return steps

    def _update_critic(self, experience: Experience) -> list[OptimizerStep]:
        """Every optimizer step of the critic."""
        config, critic, steps = self._config, self._roles.critic, []
        assert critic is not None, "there is one"
        for part in optimizer_batches(
            experience, samples_per_update=config.critic_samples_per_update, epochs=config.critic.epochs
        ):
            if part.totals().num_tokens:
                updates = as_list(critic.call.update_critic(part.partition(critic.mesh), part.totals()))
                steps.append(_optimizer_step("critic", updates, part))
        return steps

    def _update_actor(self, experience: Experience) -> tuple[list[OptimizerStep], DataProtoFuture | None]:
        """Every optimizer step of the policy, and the log-probs of the rows before their steps."""
        config, actor = self._config, self._roles.actor
        steps: list[OptimizerStep] = []
        before: list[DataProtoFuture] = []
        for part in optimizer_batches(
            experience, samples_per_update=config.samples_per_update, epochs=config.actor.epochs
        ):
            if not part.totals().num_tokens:
                steps.append(OptimizerStep(role="actor", metrics={}, skipped=REJECTED, trained=frozenset()))
                continue
            made = future_of(actor.call.update_policy(part.partition(actor.mesh), part.totals()))
            steps.append(_optimizer_step("actor", updates_of(made.select([], []).get()), part))
            before.append(made.select(["log_probs", "entropys"]))
        return steps, DataProtoFuture.concat(before) if before else None

    def _summary(self, experience: Experience) -> BatchSummary:
        every_column = experience.rows.select(None, labels_for("advantages"))
        return self._roles.actor.call.summarize_batch(cast(DataProto, every_column))

    def _control_kl(self, summary: BatchSummary) -> dict[str, float]:
        """Move the coefficient of the KL penalty towards its target; what it was."""
        if not self._config.algorithm.use_kl_in_reward:
            return {}
        used: dict[str, float] = {REWARD_KL_COEF: self.kl.value}
        self.kl.update(summary.metrics[REWARD_KL], len(summary.advantages))
        return used


def _optimizer_step(role: str, updates: Sequence[Update], part: Experience) -> OptimizerStep:
    """The step that all ranks took, and whose samples it was."""
    update = merged_update(updates)
    counted = zip(part.reports, part.num_trained, strict=True)
    trained = frozenset(report.episode_id for report, count in counted if count)
    return OptimizerStep(
        role=role,
        metrics=update.metrics,
        skipped=update.skipped,
        trained=frozenset() if update.skipped else trained,
    )


def _draw_metrics(scores: Tensor, drawn: Sequence[int]) -> dict[str, float]:
    """RESAMPLING of the rows that were drawn."""
    counts = torch.bincount(torch.tensor(drawn), minlength=len(scores))  # [B]
    return {
        RESAMPLING.of("not_drawn_samples"): float((counts == 0).sum()),
        RESAMPLING.of("max_draws"): float(counts.max()),
        RESAMPLING.of("score_mean"): float((scores * counts).sum() / counts.sum()),
    }


def _kept_rows(scores: Tensor, experience: Experience, keep: KeepConfig) -> list[int]:
    """Row numbers of the samples that are kept, all rows of each; every row carries the score of its sample."""
    row_of = {report.episode_id: row for row, report in enumerate(experience.reports)}
    samples, rows = list(row_of), list(row_of.values())
    uids = [experience.reports[row].uid for row in rows]
    kept = kept_samples(scores[rows].tolist(), uids, best=keep.best, min_score=keep.min_score)
    names = {samples[number] for number in kept}
    return [row for row, report in enumerate(experience.reports) if report.episode_id in names]


def _keep_metrics(
    scores: Tensor, experience: Experience, kept: Experience, rows: Sequence[int]
) -> dict[str, float]:
    """KEEP, of all rows and of those that are kept."""
    lost = {one.uid for one in experience.reports} - {one.uid for one in kept.reports}
    numbers = {KEEP.of("samples"): float(len(kept.episode_ids)), KEEP.of("prompts_without"): float(len(lost))}
    return numbers | ({KEEP.of("score_mean"): float(scores[list(rows)].mean())} if rows else {})
