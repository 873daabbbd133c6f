"""Validation numbers by data source and variable: val-core/... and val-aux/...

    {val-core | val-aux}/{data_source}/{variable}/{mean@N, std@N, best@k/mean, best@k/std, worst@k/...,
                                                   maj@k/..., pass@k/mean}

N is the number of samples per prompt; k is 2, 4, 8, ... and N. Every number is first taken per prompt, then
averaged over the prompts of a source. maj@k is there where a sample of the source has a prediction.
strop.algorithms.best_of_k defines the draws of best@k, worst@k and maj@k, and pass@k.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from strop.algorithms.best_of_k import Moments, best_at_k, maj_at_k, pass_at_k, worst_at_k
from strop.rewards.passing import ACC
from strop.utils.metrics import Metric
from strop.workers.metrics import VALIDATION
from strop.workers.reports import EpisodeReport

Value: TypeAlias = float | int | bool | str | None

VALIDATION_TURNS = Metric("val-aux/num_turns/{min,max,mean}", "turns", "over the samples of a validation")

CORE_STATISTICS = ("mean", "maj", "best")
"""Statistics that are val-core, for the core variable at k = N."""
PREDICTION = "pred"
"""The variable that holds each sample's extracted answer, for the majority vote."""


def metrics_of_reports(reports: Sequence[EpisodeReport], undecided: Collection[str] = ()) -> dict[str, float]:
    """Metrics of scored answers; without `acc` for sources of which it is known that nothing decides who passes."""
    names = {"reward", *(name for r in reports if r.outcome is not None for name in r.outcome.parts)}
    return validation_metrics(
        data_sources=[report.data_source for report in reports],
        uids=[report.uid for report in reports],
        variables={name: _column(reports, name, undecided) for name in sorted(names)},
        num_turns=[report.num_turns for report in reports if report.is_finished],
    )


def validation_metrics(
    *,
    data_sources: Sequence[str],
    uids: Sequence[str],
    variables: Mapping[str, Sequence[Value]],
    num_turns: Sequence[int] = (),
) -> dict[str, float]:
    """All val-core/ and val-aux/ numbers of one validation.

    Args:
        data_sources: [B], the source of each sample.
        uids: [B], equal for the samples of one prompt.
        variables: [B] each: `reward`, `acc`, `pred`, and what else the scorer returned. None where a sample
            lacks it, e.g. because scoring failed: that sample is left out of this variable, as is one whose
            value is NaN or infinite; in pass@k of `acc` it counts as not passed, as in the pass rate. Variables
            with text are not averaged.
        num_turns: [B] or empty, turns of each sample.

    Raises:
        ValueError: a column's length differs from that of `uids`.
    """
    for name, column in {"data_sources": data_sources, **variables}.items():
        if len(column) != len(uids):
            raise ValueError(
                f"validation column {name!r} has {len(column)} rows, but there are {len(uids)} uids"
            )
    rows_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, uids, strict=True)):
        rows_of[source][uid].append(row)

    metrics: dict[str, float] = {}
    for source, prompts in rows_of.items():
        num_samples = max(len(rows) for rows in prompts.values())
        rows_of_source = [row for rows in prompts.values() for row in rows]
        numeric = {
            name: column
            for name, column in variables.items()
            if _is_numeric([column[row] for row in rows_of_source])
        }
        core_variable = "acc" if "acc" in numeric else "reward"
        predictions = variables.get(PREDICTION)
        if predictions is None or all(predictions[row] in (None, "") for row in rows_of_source):
            predictions = None  # nobody votes
        for name, column in numeric.items():
            statistics = _variable_statistics(
                column,
                predictions,
                list(prompts.values()),
                num_samples,
                none_fails=name == ACC,
            )
            for statistic, value in statistics.items():
                is_core = name == core_variable and _is_core(statistic, num_samples)
                metrics[VALIDATION.of("val-core" if is_core else "val-aux", source, name, statistic)] = value
    if num_turns:
        metrics[VALIDATION_TURNS.of("min")] = float(min(num_turns))
        metrics[VALIDATION_TURNS.of("max")] = float(max(num_turns))
        metrics[VALIDATION_TURNS.of("mean")] = math.fsum(num_turns) / len(num_turns)
    return metrics


def _column(reports: Sequence[EpisodeReport], name: str, undecided: Collection[str]) -> list[Value]:
    """A variable of every sample; `acc` only of data sources where something decides whether each scored sample passes:
    over some of them it would say nothing of the others."""
    if name != ACC:
        return [_variable(report, name) for report in reports]
    without = {*undecided, *(report.data_source for report in reports if report.passes is None)}
    return [None if report.data_source in without else _variable(report, name) for report in reports]


def _variable(report: EpisodeReport, name: str) -> Value:
    if report.outcome is None:
        return None
    return report.score if name == "reward" else report.outcome.parts.get(name)


def powers_up_to(num_samples: int) -> list[int]:
    """The k that are charted: 2, 4, 8, ... below `num_samples`, and `num_samples`; none for one sample."""
    if num_samples < 2:
        return []
    return [2**i for i in range(1, num_samples.bit_length()) if 2**i < num_samples] + [num_samples]


def _variable_statistics(
    column: Sequence[Value],
    predictions: Sequence[Value] | None,
    prompts: Sequence[Sequence[int]],
    num_samples: int,
    *,
    none_fails: bool,
) -> dict[str, float]:
    """Statistics of one variable in one source, averaged over the prompts that have them. With `none_fails` a sample
    without a value counts in pass@k as one that does not pass, so that no prompt is missing there."""
    per_prompt: dict[str, list[float]] = defaultdict(list)
    is_pass_fail = all(column[row] in (0, 1, None) for rows in prompts for row in rows)
    for rows in prompts:
        numbered = [row for row in rows if _is_number(column[row])]
        values = [float(column[row] or 0.0) for row in numbered]
        num_counted = len(rows) if none_fails else len(values)
        for k in powers_up_to(num_samples):
            if is_pass_fail and k <= num_counted:
                per_prompt[f"pass@{k}/mean"].append(pass_at_k(num_counted, int(sum(values)), k))
        if not values:
            continue
        mean = math.fsum(values) / len(values)
        per_prompt[f"mean@{num_samples}"].append(mean)
        if num_samples > 1:
            variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
            per_prompt[f"std@{num_samples}"].append(math.sqrt(variance))
        for k in powers_up_to(num_samples):
            _append(per_prompt, f"best@{k}", best_at_k(values, k))
            _append(per_prompt, f"worst@{k}", worst_at_k(values, k))
            if predictions is not None:
                answers = [repr(predictions[row]) for row in numbered]
                _append(per_prompt, f"maj@{k}", maj_at_k(values, answers, k))
    return {name: math.fsum(values) / len(values) for name, values in per_prompt.items()}


def _append(per_prompt: dict[str, list[float]], name: str, moments: Moments) -> None:
    per_prompt[f"{name}/mean"].append(moments.mean)
    per_prompt[f"{name}/std"].append(moments.std)


def _is_numeric(values: Sequence[Value]) -> bool:
    present = [value for value in values if value is not None]
    return bool(present) and not any(isinstance(value, str) for value in present)


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_core(statistic: str, num_samples: int) -> bool:
    name, _, rest = statistic.partition("@")
    return name in CORE_STATISTICS and rest.partition("/")[0] == str(num_samples)
