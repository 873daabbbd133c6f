"""Training rows of episodes, and the failures that end a run. collectors/ fills steps with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strop.algorithms.registry import STEP_COLUMNS
from strop.protocol import DataProto
from strop.protocol.schema import made_by
from strop.rewards import check_failed_share
from strop.rollout.types import Sampling
from strop.trainer.config import Config
from strop.trainer.rollout_batch import RolloutBatch
from strop.trainer.worker_groups import WorkerGroups
from strop.workers.reports import EpisodeReport, check_failed_episodes, training_rewards
from strop.workers.reward_shaping import shaped


class TooFewGroups(RuntimeError):
    """Groups that cannot teach were left out up to the limit, and the run was told to stop there."""


def training_rows(
    config: Config, roles: WorkerGroups, episodes: RolloutBatch, sampling: Sampling
) -> RolloutBatch:
    """The samples that can be trained on, with their rewards.

    Args:
        config, roles: of the run.
        episodes: samples, those of a prompt together.
        sampling: how they were played.
    """
    reports, limit = episodes.reports, sampling.max_tokens
    weighted = training_rewards(reports, weight=config.reward.weight)
    rewards = shaped(config.reward, config.algorithm, reports, weighted, limit)
    trainable = episodes.take([number for number, report in enumerate(reports) if report.id in rewards])
    column = torch.tensor([rewards[report.id] for report in trainable.reports], dtype=torch.float64)
    rewarded = trainable.rows.union(DataProto.from_dict({"reward": column}))
    row_reports = tuple(row for report in trainable.reports for row in report.rows())
    left_out = {"reward_baselines"} | (set() if config.algorithm.reward_keys else {"reward_parts"})
    left_out |= set() if config.compares_answers else STEP_COLUMNS
    return RolloutBatch(
        rows=roles.again_after_loss(lambda: roles.rollout.call.make_training_batch(rewarded).wait()),
        reports=row_reports,
        column_names=made_by("rollout") - left_out,
        num_trained=tuple(report.num_sampled_tokens for report in row_reports),
    )


def check_failures(config: Config, reports: Sequence[EpisodeReport]) -> None:
    """Refuse a step of which too many samples failed, or could not be scored.

    Raises:
        EpisodesFailed, RewardError: as above.
    """
    check_failed_episodes(reports)
    outcomes = [report.outcome for report in reports if report.outcome is not None]
    reward = config.reward
    check_failed_share(outcomes, max_failed_share=reward.max_failed_share, timeout_s=reward.timeout_s)
