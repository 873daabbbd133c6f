"""Staleness of the samples of a step: versions between the sampling policy and the trained one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from strop.utils.metrics import Metric
from strop.workers.reports import EpisodeReport

STALENESS = Metric(
    "training/off_policy/{trajectory_staleness,trajectory_staleness_worst,trajectory_spans}/{mean,max,min}",
    "versions",
    "of the samples of a step, how many versions older than the policy their last token and (`worst`) their first one "
    "are, and how many lie between the two",
)
HISTOGRAM = Metric(
    "training/off_policy/samples_by_staleness/<versions>",
    "samples",
    "how many began so many versions earlier",
)


def staleness_metrics(reports: Sequence[EpisodeReport], version: int) -> dict[str, float]:
    """STALENESS and HISTOGRAM of samples that are trained at this version."""
    spans = [report.versions for report in reports if report.num_sampled_tokens]
    if not spans:
        return {}
    numbers = {
        "trajectory_staleness": [version - newest for _, newest in spans],
        "trajectory_staleness_worst": [version - oldest for oldest, _ in spans],
        "trajectory_spans": [newest - oldest for oldest, newest in spans],
    }
    metrics: dict[str, float] = {}
    for name, values in numbers.items():
        metrics[STALENESS.of(name, "mean")] = sum(values) / len(values)
        metrics[STALENESS.of(name, "max")] = float(max(values))
        metrics[STALENESS.of(name, "min")] = float(min(values))
    counts = Counter(numbers["trajectory_staleness_worst"])
    return metrics | {HISTOGRAM.of(str(age)): float(count) for age, count in sorted(counts.items())}
