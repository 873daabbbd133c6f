"""Validation: answers on prompts that are not trained on, and how sure their pass rate is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.algorithms.evaluation import clustered_interval, pass_at_k, vote_at_k
from strop.workers.reports import EpisodeReport
from strop.workers.validation_metrics import PREDICTION, powers_up_to, validation_metrics


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A share of prompts, and how sure it is."""

    rate: float
    low: float
    high: float
    """95 % interval, with the answers to one prompt as a cluster."""


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
        return clustered_interval([passed[uid] for uid in answers], list(answers.values()))

    def pass_at(self) -> Mapping[int, Rate]:
        """By k: the chance that one of k answers passes, without bias; k is 2, 4, 8, ... and the number of answers to
        each prompt."""
        by_prompt = self._by_prompt()
        passed = [[report.passes for report in reports] for reports in by_prompt]
        return {
            k: _rate([pass_at_k(len(some), sum(some), k) for some in passed], passed, k)
            for k in powers_up_to(min(map(len, passed)))
        }

    def maj_at(self) -> Mapping[int, Rate]:
        """By k: the chance that the most frequent of k extracted answers (`pred` of the scorer) passes; empty where the
        scorer extracts none. An answer without one votes for none, which does not pass."""
        by_prompt = self._by_prompt()
        if not any(_prediction(report) for reports in by_prompt for report in reports):
            return {}
        passed = [[report.passes for report in reports] for reports in by_prompt]
        votes = [[_prediction(report) for report in reports] for reports in by_prompt]
        return {
            k: _rate(
                [vote_at_k(list(map(float, some)), own, k) for some, own in zip(passed, votes, strict=True)],
                passed,
                k,
            )
            for k in powers_up_to(min(map(len, passed)))
        }

    def _by_prompt(self) -> list[list[EpisodeReport]]:
        found: dict[str, list[EpisodeReport]] = {}
        for report in self.reports:
            found.setdefault(report.uid, []).append(report)
        return list(found.values())

    def describe(self) -> str:
        """`pass rate 91.0 % (95 % interval 86.2 to 94.2) on 200 answers`."""
        low, high = self.interval()
        line = (
            f"pass rate {100 * self.pass_rate:.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f}) "
            f"on {self.num_answers} answers"
        )
        num_prompts = len({report.uid for report in self.reports})
        if num_prompts < self.num_answers:
            line += f" to {num_prompts} prompts"
        if self.num_unscored:
            line += f"; {self.num_unscored} could not be scored and count as failed"
        return line


def summarize_validation(reports: Sequence[EpisodeReport]) -> Validation:
    """Pass rate and metrics of scored answers."""
    names = {"reward", *(name for r in reports if r.outcome is not None for name in r.outcome.parts)}
    metrics = validation_metrics(
        data_sources=[report.data_source for report in reports],
        uids=[report.uid for report in reports],
        variables={name: [_variable(report, name) for report in reports] for name in sorted(names)},
        num_turns=[report.num_turns for report in reports if report.is_finished],
    )
    return Validation(
        reports=list(reports),
        metrics=metrics,
        num_answers=len(reports),
        num_passed=sum(report.passes for report in reports),
        num_unscored=sum(report.accuracy is None for report in reports),
    )


def _rate(values: Sequence[float], answers: Sequence[Sequence[bool]], k: int) -> Rate:
    """The mean over prompts of a number between 0 and 1 about k answers, each from so many answers: n answers tell of
    at most n / k such trials."""
    trials = [len(some) / k for some in answers]
    shares = [value * count for value, count in zip(values, trials, strict=True)]
    low, high = clustered_interval(shares, trials)
    return Rate(rate=math.fsum(values) / len(values), low=low, high=high)


def _prediction(report: EpisodeReport) -> str:
    """The extracted answer; empty for none."""
    found = None if report.outcome is None else report.outcome.parts.get(PREDICTION)
    return "" if found is None or found == "" else repr(found)


def _variable(report: EpisodeReport, name: str) -> float | str | bool | None:
    if report.outcome is None:
        return None
    return report.score if name == "reward" else report.outcome.parts.get(name)
