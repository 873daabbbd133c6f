"""Record of a step: its samples, the result of the update, and its entries in the run folder: fates and a
fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.protocol.trajectory import Prompt
from strop.run import Fate, digest
from strop.trainer.learning import REJECTED, LearnerResult
from strop.trainer.rollout_batch import RolloutBatch
from strop.utils.metrics import merge_metrics, metric_values
from strop.workers.reports import EpisodeReport
from strop.workers.rows import Update


def untrained_fate(report: EpisodeReport, *, skipped: str) -> Fate:
    """Status of a sample that was not trained on, with its reason.

    Args:
        report: the sample.
        skipped: reason for which its optimizer step was not taken; empty when it was in none.
    """
    if not report.is_finished:
        return Fate("failed", report.failure)
    if report.outcome is None:
        return Fate("failed", report.stop_reason)
    if report.num_sampled_tokens == 0:
        return Fate("filtered", "no token of it was sampled")
    if skipped:
        return Fate("filtered", skipped)
    return Fate("failed", f"reward {report.outcome.kind}: {report.outcome.error}")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Results of the stages of one step so far, or the samples of a part of it."""

    step: int
    prompts: tuple[Prompt, ...]
    episodes: RolloutBatch
    """All samples, also those that are not trained on."""
    batch: RolloutBatch
    """Rows of the samples that are trained on, with the columns that generation makes."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Uids of the groups that were left out because they cannot teach, with the reason."""
    collection_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the collection of the samples."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Seconds of generation in vain (`generation_waits`), where all samples of a call are begun at once."""
    learned: LearnerResult | None = None
    """None before the update, and when no sample was left to train on."""

    @property
    def reports(self) -> tuple[EpisodeReport, ...]:
        """Reports of all samples of the step."""
        return self.episodes.reports

    @property
    def num_response_tokens(self) -> int:
        """Response tokens of all samples."""
        return sum(report.num_response_tokens for report in self.reports)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and responses."""
        return sum(report.num_tokens for report in self.reports)

    @property
    def optimizer_steps(self) -> tuple[Update, ...]:
        """As in `LearnerResult.steps`."""
        return () if self.learned is None else self.learned.steps

    @property
    def skipped(self) -> list[str]:
        """Reasons of optimizer steps that were not taken, one entry each."""
        return [step.skipped for step in self.optimizer_steps if step.skipped]

    def advantages(self) -> Mapping[str, float]:
        """Mean advantage over the trained tokens of each trained sample, by its id."""
        if self.learned is None:
            return {}
        advantages = self.learned.summary.advantages
        return {name: value for name, value in advantages.items() if name not in self.learned.left_out}

    def metrics(self) -> dict[str, float]:
        """Metrics of all stages."""
        metrics = metric_values(merge_metrics(step.metrics for step in self.optimizer_steps))
        metrics.update(self.collection_metrics)
        if self.learned is not None:
            metrics.update(self.learned.metrics)
            metrics.update(self.learned.summary.metrics)
        return metrics

    def fates(self) -> dict[str, Fate]:
        """Status of each sample, by id."""
        skipped = dict.fromkeys(self.advantages(), self.skipped[0] if self.skipped else "")
        trained: frozenset[str] = frozenset()
        if self.learned is not None:
            skipped |= dict.fromkeys(self.learned.rejected, REJECTED)
            skipped |= self.learned.left_out
            trained = self.learned.trained
        return {
            report.id: Fate("trained")
            if report.id in trained
            else untrained_fate(report, skipped=skipped.get(report.id, self.dropped.get(report.uid, "")))
            for report in self.reports
        }

    def digests(self, weights: Mapping[str, str]) -> dict[str, str]:
        """Digest of each stage, in the order in which they happen.

        Args:
            weights: checksum of the weights of each trained role after the step.
        """
        losses = [number for step in self.optimizer_steps for number in step.losses()]
        videos = [media.key for prompt in self.prompts for media in prompt.media if media.frames]
        return {
            "data": digest([prompt.uid for prompt in self.prompts], *videos),
            **({} if self.learned is None else self.learned.summary.digests),
            "loss": digest(list(map(float.hex, losses))),
            "weights": weights["actor"],
            **{f"{role}_weights": value for role, value in weights.items() if role != "actor"},
        }
