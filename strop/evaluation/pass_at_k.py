"""pass@k and maj@k of a validation, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.algorithms.best_of_k import pass_at_k, vote_at_k
from strop.algorithms.intervals import clustered_interval
from strop.trainer.validation import Validation
from strop.trainer.validation_metrics import PREDICTION, powers_up_to
from strop.workers.reports import EpisodeReport


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A share of prompts, with its interval."""

    rate: float
    low: float
    high: float
    """95 % interval, with the answers to one prompt as a cluster."""


def pass_at(validation: Validation) -> Mapping[int, Rate]:
    """By k: the chance that one of k answers passes, without bias; k is 2, 4, 8, ... and the number of answers to
    each prompt. Empty where nothing decides which answers pass."""
    by_prompt = _by_prompt(validation)
    if validation.num_passed is None:
        return {}
    passed = [[bool(report.passes) for report in reports] for reports in by_prompt]
    return {
        k: _rate([pass_at_k(len(passes), sum(passes), k) for passes in passed], passed, k)
        for k in powers_up_to(min(map(len, passed)))
    }


def maj_at(validation: Validation) -> Mapping[int, Rate]:
    """By k: the chance that the most frequent of k extracted answers (`pred` of the scorer) passes, over the prompts of
    data sources whose scorer extracts any; empty where none does, and where nothing decides which answers pass. An
    answer without one votes for none, which does not pass."""
    voting = {report.data_source for report in validation.reports if _prediction(report)}
    by_prompt = [reports for reports in _by_prompt(validation) if reports[0].data_source in voting]
    if validation.num_passed is None or not by_prompt:
        return {}
    passed = [[bool(report.passes) for report in reports] for reports in by_prompt]
    votes = [[_prediction(report) for report in reports] for reports in by_prompt]
    return {
        k: _rate(
            [
                vote_at_k(list(map(float, passes)), predictions, k)
                for passes, predictions in zip(passed, votes, strict=True)
            ],
            passed,
            k,
        )
        for k in powers_up_to(min(map(len, passed)))
    }


def _by_prompt(validation: Validation) -> list[list[EpisodeReport]]:
    reports: dict[str, list[EpisodeReport]] = {}
    for report in validation.reports:
        reports.setdefault(report.uid, []).append(report)
    return list(reports.values())


def _rate(values: Sequence[float], answers: Sequence[Sequence[bool]], k: int) -> Rate:
    """The mean over prompts of a number between 0 and 1 about k answers, each from so many answers: n answers tell of
    at most n / k such trials."""
    trials = [len(passes) / k for passes in answers]
    shares = [value * count for value, count in zip(values, trials, strict=True)]
    low, high = clustered_interval(shares, trials)
    return Rate(rate=math.fsum(values) / len(values), low=low, high=high)


def _prediction(report: EpisodeReport) -> str:
    """The extracted answer; empty for none."""
    prediction = None if report.outcome is None else report.outcome.parts.get(PREDICTION)
    return "" if prediction is None or prediction == "" else repr(prediction)
