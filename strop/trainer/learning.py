"""From scored samples to new weights: the algorithm of a step, one line per arrow of the data-flow figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strop.algorithms.kl_control import KlController
from strop.algorithms.shaping import drawn_rows
from strop.base.metrics import Metric, Reduction
from strop.controller import as_batch, as_future, as_list
from strop.protocol import DataProtoFuture
from strop.protocol.schema import labels_for
from strop.trainer.config import Config
from strop.trainer.experience import Experience, optimizer_batches
from strop.trainer.phases import Stages
from strop.trainer.producers import StepContext, produced, wanted_before_updates, wanted_by_the_update
from strop.trainer.roles import Roles
from strop.workers.estimates import REWARD_KL
from strop.workers.reports import check_versions
from strop.workers.rows import Update, merged_update, updates_of
from strop.workers.summary import BatchSummary, answer_scores

REWARD_KL_COEF = Metric(
    "actor/reward_kl_penalty_coeff", "1", "factor of the KL in the reward, when there is one"
)
NOT_DRAWN = "not drawn"
"""Why a sample was filtered."""
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
    """actor or critic."""
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
    """The critic's first."""
    not_drawn: frozenset[str]
    """Ids of the samples that resampling left out."""
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
    """Updates critic and policy; holds what the algorithm carries from step to step."""

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
        experience = produced(experience, wanted, context, stages)
        trained, not_drawn = self._drawn(experience, step)
        steps: list[OptimizerStep] = []
        if config.uses_critic:
            steps += stages.run("update_critic", "critic", self._update_critic, trained)
        if step > config.trainer.critic_warmup:
            trained = produced(trained, wanted_by_the_update(config, trained), context, stages)
            taken, before = stages.run("update_actor", "actor", self._update_actor, trained)
            steps += taken
            if "old_log_probs" not in experience.column_names and before is not None:
                experience = experience.union(before, "log_probs", "entropys")
        summary = stages.run("summary", "", self._summary, experience)
        return LearnerResult(
            experience=experience,
            summary=summary,
            steps=tuple(steps),
            not_drawn=not_drawn,
            metrics={**trained.metrics, **self._control_kl(summary)},
        )

    def _drawn(self, experience: Experience, step: int) -> tuple[Experience, frozenset[str]]:
        """The rows that are trained on, and the samples that were not drawn; a row that was drawn twice is there twice.

        Rows of which a correction left no token cannot be drawn.
        """
        config = self._config
        if config.algorithm.resampling == "none":
            return experience, frozenset()
        usable = experience.take([row for row, count in enumerate(experience.num_trained) if count])
        if not len(usable):
            return usable, frozenset()
        scores = answer_scores(usable.taken_by("resampling").get().tensors(), dtype=torch.float64)
        uids = [report.uid for report in usable.reports]
        chosen = drawn_rows(scores, uids, config.algorithm, seed=config.trainer.seed, step=step)
        drawn = usable.take(chosen)
        drawn = replace(drawn, metrics={**drawn.metrics, **_draw_metrics(scores, chosen)})
        return drawn, usable.episode_ids - drawn.episode_ids

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
            made = as_future(actor.call.update_policy(part.partition(actor.mesh), part.totals()))
            steps.append(_optimizer_step("actor", updates_of(made.select([], []).get()), part))
            before.append(made.select(["log_probs", "entropys"]))
        return steps, DataProtoFuture.concat(before) if before else None

    def _summary(self, experience: Experience) -> BatchSummary:
        every_column = experience.rows.select(None, labels_for("advantages"))
        return self._roles.actor.call.summarize_batch(as_batch(every_column))

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
