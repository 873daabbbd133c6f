"""Validation: answers on prompts that are not trained on, and how sure their pass rate is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from strop.base.guests import needed, optional, targets
from strop.workers.reports import EpisodeReport


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The result of one pass over validation prompts."""

    reports: list[EpisodeReport]
    metrics: dict[str, float]
    """val-core/... and val-aux/... by data source."""
    num_answers: int
    num_passed: int
    num_unscored: int
    """Answers whose scorer failed; they count as not passed."""

    @property
    def pass_rate(self) -> float:
        """Share of answers that pass."""
        return self.num_passed / self.num_answers

    def interval(self) -> tuple[float, float]:
        """95 % interval of the pass rate; the answers to one prompt count as alike as they are."""
        passed, answers = Counter[str](), Counter[str]()
        for report in self.reports:
            answers[report.uid] += 1
            passed[report.uid] += report.passes
        interval = needed("interval of a rate", "an interval of a pass rate is asked for")
        low, high = interval([passed[uid] for uid in answers], list(answers.values()))
        return low, high

    @property
    def has_interval(self) -> bool:
        """There is what gives intervals."""
        return bool(targets("interval of a rate"))

    def describe(self) -> str:
        """`pass rate 91.0 % (95 % interval 86.2 to 94.2) on 200 answers`."""
        line = f"pass rate {100 * self.pass_rate:.1f} %"
        if self.has_interval:
            line += " (95 % interval {:.1f} to {:.1f})".format(*(100 * end for end in self.interval()))
        line += f" on {self.num_answers} answers"
        num_prompts = len({report.uid for report in self.reports})
        if num_prompts < self.num_answers:
            line += f" to {num_prompts} prompts"
        if self.num_unscored:
            line += f"; {self.num_unscored} could not be scored and count as failed"
        return line


def summarize_validation(reports: Sequence[EpisodeReport]) -> Validation:
    """Pass rate and metrics of scored answers."""
    measure = optional("metrics of a validation")
    return Validation(
        reports=list(reports),
        metrics={} if measure is None else measure(reports),
        num_answers=len(reports),
        num_passed=sum(report.passes for report in reports),
        num_unscored=sum(report.accuracy is None for report in reports),
    )
