"""The samples of a prompt together: what shaping makes of their rewards, and what a sampler learns of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from strop.algorithms.stream_calls import shaped_rewards
from strop.algorithms.stream_functions import SampleGroup
from strop.data.sampler import RowResult, parse_visit_uid
from strop.protocol import DataProto
from strop.trainer.config import Config
from strop.trainer.experience import Experience
from strop.workers.reports import EpisodeReport


def sample_groups(reports: Sequence[EpisodeReport]) -> list[SampleGroup]:
    """The samples that are trained on by prompt, in the order of first appearance; a prompt without any has an empty
    group."""
    held: dict[str, list[EpisodeReport]] = {}
    source: dict[str, str] = {}
    for report in reports:
        usable = held.setdefault(report.uid, [])
        source[report.uid] = report.data_source
        if report.reward() is not None:
            usable.append(report)
    groups = []
    for uid, samples in held.items():
        rewards = [sample.reward() or 0.0 for sample in samples]
        groups.append(
            SampleGroup(
                uid=uid,
                data_source=source[uid],
                rewards=tuple(rewards),
                accuracies=tuple(
                    reward if sample.accuracy is None else sample.accuracy
                    for sample, reward in zip(samples, rewards, strict=True)
                ),
                parts=tuple({} if s.outcome is None else dict(s.outcome.parts) for s in samples),
                response_lengths=tuple(sample.num_response_tokens for sample in samples),
                num_turns=tuple(sample.num_turns for sample in samples),
                stop_reasons=tuple(sample.stop_reason for sample in samples),
            )
        )
    return groups


def shaped_by_group(
    config: Config, reports: Sequence[EpisodeReport], plain: Mapping[str, float], max_response_tokens: int
) -> dict[str, float]:
    """By sample id, what algorithm.reward_shaping makes of what each sample is trained with.

    Args:
        config: of the run.
        reports: samples, those of a prompt with the same uid.
        plain: their `training_rewards`.
        max_response_tokens: limit of a response, which penalties on long ones refer to.
    """
    ids: dict[str, list[str]] = {}
    for report in reports:
        if report.id in plain:
            ids.setdefault(report.uid, []).append(report.id)
    shaped: dict[str, float] = {}
    for group in sample_groups(reports):
        members = ids.get(group.uid, [])
        if members:
            rewards = shaped_rewards(
                config.algorithm.reward_shaping,
                group,
                [plain[member] for member in members],
                max_response_tokens=max_response_tokens,
                settings=config.algorithm.shaping_settings,
            )
            shaped |= dict(zip(members, rewards, strict=True))
    return shaped


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
