"""The samples of a step by prompt, as filters see them, and what shaping makes of their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.group_functions import SampleGroup
from strop.algorithms.group_functions.calls import shaped_rewards
from strop.algorithms.group_functions.shaping import overlong_penalty
from strop.rewards.config import RewardConfig
from strop.workers.reports import EpisodeReport


def sample_groups(reports: Sequence[EpisodeReport]) -> list[SampleGroup]:
    """The samples that are trained on by prompt, in the order of first appearance; a prompt without any has an empty
    group."""
    by_uid: dict[str, list[EpisodeReport]] = {}
    source: dict[str, str] = {}
    for report in reports:
        usable = by_uid.setdefault(report.uid, [])
        source[report.uid] = report.data_source
        if report.reward() is not None:
            usable.append(report)
    groups = []
    for uid, samples in by_uid.items():
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


def shaped(
    reward: RewardConfig,
    algorithm: AlgorithmConfig,
    reports: Sequence[EpisodeReport],
    plain: Mapping[str, float],
    max_response_tokens: int,
) -> Mapping[str, float]:
    """By sample id, what each sample is trained with: less what a long response loses, then as
    algorithm.reward_shaping has it.

    Args:
        reward, algorithm: sections of the run.
        reports: samples, those of a prompt with the same uid.
        plain: their `training_rewards`.
        max_response_tokens: limit of a response, which penalties on long ones refer to.
    """
    rewards = penalized(reward, reports, plain, max_response_tokens)
    if algorithm.reward_shaping:
        rewards = shaped_by_group(algorithm, reports, rewards, max_response_tokens)
    return rewards


def penalized(
    reward: RewardConfig,
    reports: Sequence[EpisodeReport],
    plain: Mapping[str, float],
    max_response_tokens: int,
) -> Mapping[str, float]:
    """The rewards, less what long responses lose by reward.overlong_buffer; arguments as of `shaped`.

    The penalty is full at the length at which a response is cut, which is below the limit where the agent has put
    tokens of its own behind the prompt of the row.
    """
    if not reward.overlong_buffer:
        return plain
    trained = [report for report in reports if report.id in plain]
    penalties = overlong_penalty(
        torch.tensor([report.num_added_tokens + report.num_response_tokens for report in trained]),
        max_tokens=max_response_tokens,
        buffer_tokens=reward.overlong_buffer,
        factor=reward.overlong_penalty,
    )
    return {
        report.id: plain[report.id] + less for report, less in zip(trained, penalties.tolist(), strict=True)
    }


def shaped_by_group(
    algorithm: AlgorithmConfig,
    reports: Sequence[EpisodeReport],
    plain: Mapping[str, float],
    max_response_tokens: int,
) -> dict[str, float]:
    """By sample id, what algorithm.reward_shaping makes of what each sample is trained with.

    Args:
        algorithm: says which function, and its settings.
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
                algorithm.reward_shaping,
                group,
                [plain[member] for member in members],
                max_response_tokens=max_response_tokens,
                settings=algorithm.shaping_settings,
            )
            shaped |= dict(zip(members, rewards, strict=True))
    return shaped
