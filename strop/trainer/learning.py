"""From scored samples to new weights: the algorithm of a step, one line per arrow of the data-flow figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.algorithms.reward_kl import Control
from strop.protocol import DataProto
from strop.protocol.schema import labels_for
from strop.trainer.config import Config
from strop.trainer.producers import (
    StepContext,
    produced,
    wanted_before_updates,
    wanted_by_the_update,
)
from strop.trainer.rollout_batch import Experience, optimizer_batches
from strop.trainer.sample_selection import chosen
from strop.trainer.timing import Stages
from strop.trainer.worker_groups import Roles, learning_role
from strop.workers.reports import check_versions
from strop.workers.rows import Update, merged_update, updates_of
from strop.workers.summary import BatchSummary

REJECTED = "rollout correction rejected every token of it"
"""Why a sample was filtered."""


@dataclass(frozen=True, kw_only=True)
class LearnerResult:
    """What the samples of one step came to."""

    experience: Experience
    """All rows with all their columns."""
    summary: BatchSummary
    """Of these rows."""
    steps: tuple[Update, ...]
    """Those of other roles that learn before, then the policy's."""
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
    """Updates the policy, and other roles that learn; holds what the algorithm carries from step to step."""

    def __init__(self, config: Config, roles: Roles, facts: Mapping[str, Any] | None) -> None:
        """`facts` are those of the checkpoint that the run goes on from (method `facts`); None where it starts."""
        self._config = config
        self._roles = roles
        self._control = Control(config.algorithm)
        if facts is not None:
            self._control.load_state(facts.get("kl", {}))

    def facts(self) -> dict[str, Any]:
        """What a continuation needs of the algorithm."""
        return {"kl": self._control.state()}

    def learn(self, experience: Experience, step: int, stages: Stages) -> LearnerResult:
        """One step of the algorithm on these samples.

        Raises:
            StaleSamples: some are of an older policy, and no correction is on.
        """
        config, control = self._config, self._control
        context = StepContext(config, self._roles, control.value)
        check_versions(experience.reports, step - 1, is_corrected=config.algorithm.corrects_for_age)
        wanted = wanted_before_updates(config, len(experience.sample_starts))
        taken_first = {name for one in self._learners("before").values() for name in one.update_takes}
        experience = produced(experience, taken_first, context, stages)
        steps = self._update_others("before", experience, stages)
        experience = produced(experience, wanted, context, stages)
        steps += self._update_others("after", experience, stages)
        trained, left_out = experience, dict[str, str]()
        if config.chooses_samples:
            trained, left_out = chosen(experience, config, step)
        steps += self._update_others("chosen", trained, stages)
        if step > config.trainer.critic_warmup:
            trained = produced(trained, wanted_by_the_update(config, trained), context, stages)
            with stages.stage("update_actor", "actor"):
                taken, before = self._update_actor(trained)
            steps += taken
            if "old_log_probs" not in experience.column_names and before is not None:
                experience = experience.union(before, "log_probs", "entropys")
        with stages.stage("summary"):
            summary = self._summary(experience)
        used = control.follow(summary.metrics, len(summary.advantages))
        return LearnerResult(
            experience=experience,
            summary=summary,
            steps=tuple(steps),
            left_out=left_out,
            metrics={**trained.metrics, **used},
        )

    def _learners(self, when: str) -> dict[str, Any]:
        """The sections of further roles that learn then, by name."""
        return {
            name: section
            for name, section in self._config.further_roles.items()
            if name in self._roles.others and section.learns == when
        }

    def _update_others(self, when: str, experience: Experience, stages: Stages) -> list[Update]:
        """Every optimizer step of the further roles that learn then."""
        steps: list[Update] = []
        for name in self._learners(when):
            with stages.stage(f"update_{name}", name):
                steps += learning_role(name).update(self._config, self._roles.others[name], experience)
        return steps

    def _update_actor(self, experience: Experience) -> tuple[list[Update], DataProto | None]:
        """Every optimizer step of the policy, and the log-probs of the rows before their steps."""
        config, actor = self._config, self._roles.actor
        steps: list[Update] = []
        before: list[DataProto] = []
        for part in optimizer_batches(
            experience, samples_per_update=config.samples_per_update(config.actor), epochs=config.actor.epochs
        ):
            if not part.totals().num_tokens:
                steps.append(Update(role="actor", metrics={}, skipped=REJECTED))
                continue
            made = actor.call.update_policy(part.partition(actor.mesh), part.totals())
            steps.append(of_samples(updates_of(made.select([], []).get()), part))
            before.append(made.select(["log_probs", "entropys"], meta_info_keys=[]))
        return steps, before[0].concat(before) if before else None

    def _summary(self, experience: Experience) -> BatchSummary:
        every_column = experience.rows.select(None, labels_for("advantages"))
        return self._roles.actor.call.summarize_batch(every_column)


def of_samples(updates: Sequence[Update], part: Experience) -> Update:
    """The step that all ranks took, and whose samples it was."""
    update = merged_update(updates)
    if update.skipped:
        return update
    counted = zip(part.reports, part.num_trained, strict=True)
    return replace(update, trained=frozenset(report.episode_id for report, count in counted if count))
