"""Results of rows by their samples in a step, for samplers that see results."""

from __future__ import annotations

from collections.abc import Sequence

from strop.data.curriculum import RowResult
from strop.data.visit_ids import parse_visit_uid
from strop.workers.reports import EpisodeReport


def row_results(reports: Sequence[EpisodeReport], *, step: int) -> dict[int, RowResult]:
    """Result of each row that was visited in a step, with one visit each; rows without a scored sample are left out.
    Of a row that was visited twice, in two epochs, the later visit counts."""
    scored: dict[str, list[EpisodeReport]] = {}
    for report in reports:
        if report.score is not None:
            scored.setdefault(report.uid, []).append(report)
    results: dict[int, RowResult] = {}
    for uid, samples in scored.items():
        _, row = parse_visit_uid(uid)
        mean_score = sum(sample.score or 0.0 for sample in samples) / len(samples)
        verdicts = [sample.passes for sample in samples]
        results[row] = RowResult(
            visits=results[row].visits + 1 if row in results else 1,
            mean_score=mean_score,
            pass_rate=mean_score if None in verdicts else sum(map(bool, verdicts)) / len(samples),
            last_step=step,
        )
    return results
