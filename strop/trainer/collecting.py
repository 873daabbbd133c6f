"""The samples of a step: prompts drawn, played and scored. rounds/ goes on until enough of them can teach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from strop.algorithms.registry import STEP_COLUMNS
from strop.data.prompt_loader import Drawn, draw
from strop.protocol import DataProto
from strop.protocol.schema import made_by
from strop.protocol.trajectory import Prompt
from strop.rewards import check_failed_share
from strop.rollout.types import Sampling
from strop.run import Fate, RunFolder
from strop.trainer.config import Config
from strop.trainer.records import StepRecord
from strop.trainer.rollout_batch import Experience
from strop.trainer.setup import TrainingData
from strop.trainer.timing import Stages
from strop.trainer.worker_groups import Roles
from strop.utils.metrics import Metric
from strop.workers.estimator_columns import greedy_baselines
from strop.workers.reports import EpisodeReport, check_failed_episodes, training_rewards
from strop.workers.reward_shaping import shaped

OVERLONG_PROMPTS = Metric("training/overlong_prompts", "prompts", "passed over with `data.streaming`")


class TooFewGroups(RuntimeError):
    """Groups that cannot teach were left out up to the limit, and the run was told to stop there."""


def training_rows(config: Config, roles: Roles, episodes: Experience, sampling: Sampling) -> Experience:
    """The samples that can be trained on, with their rewards.

    Args:
        config, roles: of the run.
        episodes: samples, those of a prompt together.
        sampling: how they were played.
    """
    played, limit = episodes.reports, sampling.max_tokens
    weighted = training_rewards(played, weight=config.reward.weight)
    rewards = shaped(config, played, weighted, limit)
    kept = episodes.take([number for number, one in enumerate(played) if one.id in rewards])
    column = torch.tensor([rewards[one.id] for one in kept.reports], dtype=torch.float64)
    given = kept.rows.union(DataProto.from_dict({"reward": column}))
    reports = tuple(row for one in kept.reports for row in one.rows())
    left_out = {"reward_baselines"} | (set() if config.algorithm.reward_keys else {"reward_parts"})
    left_out |= set() if config.compares_answers else STEP_COLUMNS
    return Experience(
        rows=roles.rollout.call.rows(given),
        reports=reports,
        column_names=made_by("rollout") - left_out,
        num_trained=tuple(report.num_sampled_tokens for report in reports),
    )


class RolloutCollector:
    """Fills steps with samples."""

    def __init__(
        self, config: Config, run: RunFolder, data: TrainingData, roles: Roles, sampling: Sampling
    ) -> None:
        self._config, self._run, self._data, self._roles = config, run, data, roles
        self._sampling = sampling
        self._first: Callable[[Sequence[Prompt]], Sequence[Prompt]] | None = None
        """Gives the prompts of a step in the order in which they are begun; None: in their own."""

    def collect(self, step: int, stages: Stages, num_prompts: int | None = None) -> StepRecord:
        """The prompts of the next visits, played and scored; they count as consumed, with those that were passed over.

        Args:
            step: from 1.
            stages: of the step, where models look at samples before all have ended.
            num_prompts: not data.prompts_per_step, but so many.

        Raises:
            EpisodesFailed, RewardError: too many samples failed.
        """
        config = self._config
        drawn = self._issue(step, num_prompts or config.data.prompts_per_step)
        prompts = drawn.prompts
        baselines = None
        if config.needs("reward_baselines"):
            baselines = greedy_baselines(config, self._roles, prompts, self._sampling)
        episodes = self._roles.play(
            prompts, config.rollout.samples_per_prompt, self._sampling, first=self._first
        )
        self._check(episodes.reports)
        experience = training_rows(config, self._roles, episodes, self._sampling)
        if baselines is not None and experience.reports:
            experience = experience.union(baselines(experience.reports), "reward_baselines")
        return StepRecord(
            step=step,
            prompts=tuple(prompts),
            episodes=episodes,
            experience=experience,
            collection_metrics=self._passed_over(len(drawn.refused)),
        )

    def texts(self) -> dict[str, str]:
        """Files of a checkpoint, by name, without which something would be lost."""
        return {}

    def begin_again(self, checkpoint: Path | None) -> list[str]:
        """Go on with what was in play at a checkpoint; sentences that say so."""
        return []

    def _passed_over(self, num_refused: int) -> dict[str, float]:
        """How many visits were passed over, where that may happen."""
        return {OVERLONG_PROMPTS: float(num_refused)} if self._config.data.streaming else {}

    def _issue(self, step: int, num_prompts: int) -> Drawn:
        """The next visits, in the ledger; those that are passed over have their fate."""
        drawn = draw(self._data.train, self._data.sampler, num_prompts)
        samples = range(self._config.rollout.samples_per_prompt)
        uids = [*(prompt.uid for prompt in drawn.prompts), *drawn.refused]
        self._run.ledger.issue(step, [f"{uid}/{i}" for uid in uids for i in samples])
        self._run.ledger.settle(
            step,
            {f"{uid}/{i}": Fate("filtered", why) for uid, why in drawn.refused.items() for i in samples},
        )
        return drawn

    def _check(self, reports: Sequence[EpisodeReport]) -> None:
        """Too many samples that failed, or could not be scored, end the run."""
        check_failed_episodes(reports)
        outcomes = [report.outcome for report in reports if report.outcome is not None]
        reward = self._config.reward
        check_failed_share(outcomes, max_failed_share=reward.max_failed_share, timeout_s=reward.timeout_s)
