"""Validation: answers on prompts that are not trained on, how many pass, and how sure that is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from strop.algorithms.intervals import clustered_interval, mean_interval
from strop.trainer.validation_metrics import metrics_of_reports
from strop.workers.metrics import MEAN_REWARD, PASS_RATE
from strop.workers.reports import EpisodeReport, is_decided


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The result of one pass over validation prompts."""

    reports: list[EpisodeReport]
    metrics: dict[str, float]
    """val-core/... and val-aux/... by data source."""
    num_answers: int
    num_passed: int | None
    """None where nothing decides which answers pass (strop/rewards/passing.py)."""
    num_unscored: int
    """Answers whose scorer failed; they count as not passed, and are in no mean."""
    mean_reward: float | None
    """Mean score of the others; None where there is none."""

    def __repr__(self) -> str:
        return f"Validation({self.describe()})"

    @property
    def pass_rate(self) -> float | None:
        """Share of answers that pass; None where nothing decides which do."""
        return None if self.num_passed is None else self.num_passed / self.num_answers

    @property
    def score(self) -> float | None:
        """The number that validations are compared by: the pass rate, else the mean reward."""
        return self.mean_reward if self.pass_rate is None else self.pass_rate

    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the pass rate, None where there is none; the answers to one prompt count as alike as they
        are."""
        if self.num_passed is None:
            return None
        passed, answers = Counter[str](), Counter[str]()
        for report in self.reports:
            answers[report.uid] += 1
            passed[report.uid] += bool(report.passes)
        return clustered_interval([passed[uid] for uid in answers], list(answers.values()))

    def reward_interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean reward, over prompts; None where fewer than two have rewards, or none differ."""
        rewards: dict[str, list[float]] = {}
        for report in self.reports:
            if report.score is not None:
                rewards.setdefault(report.uid, []).append(report.score)
        return mean_interval(
            [math.fsum(some) for some in rewards.values()], [len(some) for some in rewards.values()]
        )

    def describe(self) -> str:
        """`pass rate 91.0 % (95 % interval 86.2 to 94.2) on 200 answers`, or `mean reward 0.42 (95 % interval 0.38 to
        0.46) on 200 answers`; of answers of which none could be scored, why."""
        if self.num_unscored == self.num_answers:
            errors = [report.outcome.error for report in self.reports if report.outcome is not None]
            cause = f" (the first: {errors[0]})" if errors else ""
            return f"none of {self.num_answers} answers could be scored, so none counts as passed{cause}"
        if self.pass_rate is None:
            line = f"mean reward {self.mean_reward:.4g}"
            if (interval := self.reward_interval()) is not None:
                line += " (95 % interval {:.4g} to {:.4g})".format(*interval)
        else:
            line = f"pass rate {100 * self.pass_rate:.1f} %"
        if (interval := self.interval()) is not None:
            line += " (95 % interval {:.1f} to {:.1f})".format(*(100 * end for end in interval))
        line += f" on {self.num_answers} answers"
        num_prompts = len({report.uid for report in self.reports})
        if num_prompts < self.num_answers:
            line += f" to {num_prompts} prompts"
        if self.num_unscored:
            line += f"; {self.num_unscored} could not be scored"
            line += " and count as failed" if self.pass_rate is not None else ""
        if self.pass_rate is None:
            line += "; no pass rate: nothing says which answers pass (give `acc`, or set reward.pass_by)"
        return line


def summarize_validation(reports: Sequence[EpisodeReport], *, undecided: Collection[str] = ()) -> Validation:
    """Pass rate and metrics of scored answers.

    Args:
        reports: of the answers.
        undecided: data sources of which it is known that their rewards are no verdicts.
    """
    scores = [report.score for report in reports if report.score is not None]
    known = any(report.data_source in undecided for report in reports)
    has_verdicts = is_decided(reports) and not (known and scores)
    num_passed = sum(bool(report.passes) for report in reports) if has_verdicts else None
    mean_reward = math.fsum(scores) / len(scores) if scores else None
    numbers = {PASS_RATE: None if num_passed is None else num_passed / len(reports), MEAN_REWARD: mean_reward}
    defined = {name: number for name, number in numbers.items() if number is not None}
    return Validation(
        reports=list(reports),
        metrics={**metrics_of_reports(reports, undecided), **defined},
        num_answers=len(reports),
        num_passed=num_passed,
        num_unscored=len(reports) - len(scores),
        mean_reward=mean_reward,
    )
