"""What a sampler learns of the prompts of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strop.data.sampler import RowResult, parse_visit_uid
from strop.protocol import DataProto
from strop.trainer.experience import Experience
from strop.workers.reports import EpisodeReport


def row_results(reports: Sequence[EpisodeReport], *, step: int) -> dict[int, RowResult]:
    """What came of each row that was visited in a step, with one visit each; rows without a scored sample are left
    out. Of a row that was visited twice, in two epochs, the later visit counts."""
    scored: dict[str, list[EpisodeReport]] = {}
    for report in reports:
        if report.score is not None:
            scored.setdefault(report.uid, []).append(report)
    results: dict[int, RowResult] = {}
    for uid, samples in scored.items():
        _, row = parse_visit_uid(uid)
        passed = sum(sample.passes for sample in samples)
        results[row] = RowResult(
            visits=results[row].visits + 1 if row in results else 1,
            mean_score=sum(sample.score or 0.0 for sample in samples) / len(samples),
            pass_rate=passed / len(samples),
            last_step=step,
        )
    return results


def sampler_batch(experience: Experience) -> DataProto:
    """What a sampler in verl's form is shown of a step: per sample the scores, rewards and advantages, with uid
    and the row's number (`index`), without the tokens."""
    rows = experience.taken_by("sampler").get()
    numbers = np.array([parse_visit_uid(report.uid)[1] for report in experience.reports], dtype=object)
    return rows.union(DataProto.from_dict({}, non_tensors={"index": numbers}))
