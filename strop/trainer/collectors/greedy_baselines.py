"""Greedy baselines, which some estimators take (ReMax)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt
from strop.rollout.types import Sampling
from strop.trainer.config import Config
from strop.trainer.worker_groups import WorkerGroups
from strop.workers.reports import EpisodeReport, training_rewards
from strop.workers.reward_shaping import penalized


def greedy_baselines(
    config: Config, roles: WorkerGroups, prompts: Sequence[Prompt], sampling: Sampling
) -> Callable[[Sequence[EpisodeReport]], DataProto]:
    """Play and score the greedy answers; what gives the column reward_baselines [B] of training rows.

    Baselines and samples are measured alike. Where the greedy answer could not be scored, it is the mean of the
    prompt's samples, which is what it estimates.

    Args:
        config, roles: of the run.
        prompts: of a step.
        sampling: of its samples.
    """

    def measured(reports: Sequence[EpisodeReport]) -> Mapping[str, float]:
        plain = training_rewards(reports, weight=config.reward.weight)
        return penalized(config.reward, reports, plain, sampling.max_tokens)

    played = roles.run_episodes(prompts, 1, replace(sampling, temperature=0.0, top_p=1.0, top_k=0)).reports
    rewards = measured(played)
    greedy = {report.uid: rewards.get(report.id) for report in played}

    def column(reports: Sequence[EpisodeReport]) -> DataProto:
        rewards = measured(reports)
        scores: dict[str, list[float]] = {}
        for report in reports:
            scores.setdefault(report.uid, []).append(rewards[report.id])
        means = {uid: sum(values) / len(values) for uid, values in scores.items()}
        values = [
            means[report.uid] if (reward := greedy[report.uid]) is None else reward for report in reports
        ]
        return DataProto.from_dict({"reward_baselines": torch.tensor(values)})

    return column
