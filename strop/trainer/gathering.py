"""The samples of a step: prompts drawn, played and scored, in one round or, with a group filter, in several.

With algorithm.filter_groups (DAPO's dynamic sampling) a step goes on asking for prompts until it has as many
groups that can teach as data.prompts_per_step, or has asked `max_rounds` times. The batch that is trained has a
constant number of prompts then, except at that limit.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence

import torch

from strop.data.sampler import parse_visit_uid
from strop.protocol import DataProto
from strop.rewards import check_failed_share
from strop.rollout.types import Sampling
from strop.run import Fate, RunFolder
from strop.trainer.config import Config
from strop.trainer.experience import Experience, experience_of
from strop.trainer.groups import CAUSES, FAILED, SOLVED, SURPLUS, judge, shaped_rewards_of
from strop.trainer.learning import StepRecord
from strop.trainer.roles import Roles
from strop.trainer.setup import TrainingData
from strop.trajectory import Prompt
from strop.workers.played import Played
from strop.workers.reports import EpisodeReport, check_failed_episodes, training_rewards

_LOWEST_RATE = 0.1
"""Share of groups that is expected to teach at least, when the size of the next round is chosen."""


class TooFewGroups(RuntimeError):
    """Dynamic sampling came to its limit without enough groups, and was told to stop there."""


def training_rows(config: Config, roles: Roles, played: Played, sampling: Sampling) -> Experience:
    """The samples that can be trained on, with their rewards.

    Args:
        config, roles: of the run.
        played: samples, those of a prompt together.
        sampling: how they were played.
    """
    rewards = shaped_rewards_of(config, played.reports, sampling.max_tokens)
    return experience_of(
        roles.rows(played, rewards),
        played.reports,
        extra_columns=["reward_parts"] if config.algorithm.reward_keys else [],
    )


class Gatherer:
    """Fills steps with samples."""

    def __init__(
        self, config: Config, run: RunFolder, data: TrainingData, roles: Roles, sampling: Sampling
    ) -> None:
        self._config, self._run, self._data, self._roles = config, run, data, roles
        self._sampling = sampling

    def gather(self, record: StepRecord) -> Experience:
        """The samples of a step that are trained on; `record` gets all that were played.

        Raises:
            EpisodesFailed, RewardError: too many samples failed.
            TooFewGroups: filter_groups.at_limit is stop, and the limit was reached.
        """
        settings = self._config.algorithm.filter_groups
        wanted = self._config.data.prompts_per_step
        if not settings.enable:
            return self._round(record, wanted)
        rounds: list[Experience] = []
        found, rate = 0, 1.0
        while found < wanted and len(rounds) < settings.max_rounds:
            played = self._round(record, min(wanted, math.ceil((wanted - found) / rate)))
            kept = self._judged(record, record.played[-1].reports, at_most=wanted - found)
            rounds.append(played.take([i for i, r in enumerate(played.reports) if r.uid in kept]))
            found += len(kept)
            rate = max(found / len(record.prompts), _LOWEST_RATE)
        self._count(record, len(rounds))
        if found < wanted and settings.at_limit == "stop":
            raise TooFewGroups(
                f"only {found} of {wanted} groups could teach after {len(rounds)} rounds "
                f"({', '.join(f'{n} {cause}' for cause, n in Counter(record.dropped.values()).items())}): use data "
                f"of another difficulty, raise algorithm.filter_groups.max_rounds, or set at_limit=train"
            )
        return Experience.concat(rounds)

    def _round(self, record: StepRecord, num_prompts: int) -> Experience:
        """Some prompts, drawn and played."""
        prompts = self._next_prompts(record, num_prompts)
        baselines = self._greedy_rewards(prompts) if self._config.needs("reward_baselines") else {}
        played = self._roles.play(prompts, self._config.rollout.samples_per_prompt, self._sampling)
        check_failed_episodes(played.reports)
        self._check_scores(played.reports)
        record.prompts += prompts
        record.played.append(played)
        experience = training_rows(self._config, self._roles, played, self._sampling)
        if self._config.needs("reward_baselines") and experience.reports:
            experience = experience.union(self._baselines(experience, baselines), "reward_baselines")
        return experience

    def _next_prompts(self, record: StepRecord, count: int) -> list[Prompt]:
        """Prompts of the next visits; from here on they count as consumed, with those that were passed over."""
        drawn = self._data.draw(count)
        samples = range(self._config.rollout.samples_per_prompt)
        uids = [prompt.uid for prompt in drawn.prompts]
        self._run.ledger.issue(
            record.step, [f"{uid}/{i}" for uid in [*uids, *drawn.refused] for i in samples]
        )
        self._run.ledger.settle(
            record.step,
            {f"{uid}/{i}": Fate("filtered", why) for uid, why in drawn.refused.items() for i in samples},
        )
        if self._config.data.streaming:
            name = "training/overlong_prompts"
            record.numbers[name] = record.numbers.get(name, 0.0) + len(drawn.refused)
        return drawn.prompts

    def _greedy_rewards(self, prompts: list[Prompt]) -> dict[str, float | None]:
        """By uid: the reward of the greedy answer, ReMax's baseline."""
        greedy = dataclasses.replace(self._sampling, temperature=0.0, top_p=1.0, top_k=0)
        reports = self._roles.play(prompts, 1, greedy).reports
        rewards = self._training_rewards(reports)
        return {report.uid: rewards.get(report.id) for report in reports}

    def _baselines(self, experience: Experience, greedy: dict[str, float | None]) -> DataProto:
        """Column reward_baselines [B]; where the greedy answer could not be scored, the mean of the prompt's
        samples, which is what it estimates."""
        rewards = self._training_rewards(experience.reports)
        own: dict[str, list[float]] = {}
        for report in experience.reports:
            own.setdefault(report.uid, []).append(rewards[report.id])
        means = {uid: sum(rewards) / len(rewards) for uid, rewards in own.items()}
        values = [means[r.uid] if (known := greedy[r.uid]) is None else known for r in experience.reports]
        return DataProto.from_dict({"reward_baselines": torch.tensor(values)})

    def _training_rewards(self, reports: Sequence[EpisodeReport]) -> dict[str, float]:
        """By sample id, what the samples are worth: baselines and samples are measured alike."""
        limit = self._sampling.max_tokens
        return training_rewards(reports, self._config.reward, max_response_tokens=limit)

    def _check_scores(self, reports: Sequence[EpisodeReport]) -> None:
        """Too many samples that could not be scored end the run."""
        outcomes = [report.outcome for report in reports if report.outcome is not None]
        reward = self._config.reward
        check_failed_share(outcomes, max_failed_share=reward.max_failed_share, timeout_s=reward.timeout_s)

    def _judged(self, record: StepRecord, reports: Sequence[EpisodeReport], *, at_most: int) -> set[str]:
        """Uids of the groups of a round that are trained on; the record and the sampler hear of the others."""
        settings = self._config.algorithm.filter_groups
        kept: set[str] = set()
        for group in judge(reports, settings):
            cause = group.cause or (SURPLUS if len(kept) == at_most else "")
            if cause:
                record.dropped[group.uid] = cause
            else:
                kept.add(group.uid)
            epoch, row = parse_visit_uid(group.uid)
            if group.cause == SOLVED and settings.retire_solved:
                self._data.sampler.retire(row, epoch)
            if group.cause == FAILED and settings.defer_failed:
                self._data.sampler.defer(row, epoch, epochs=settings.defer_failed)
        return kept

    def _count(self, record: StepRecord, rounds: int) -> None:
        """Metrics of the filter."""
        causes = Counter(record.dropped[r.uid] for r in record.reports if r.uid in record.dropped)
        surplus = causes.pop(SURPLUS, 0)
        prefix = "training/filter_groups"
        record.numbers[f"{prefix}/rounds"] = float(rounds)
        record.numbers[f"{prefix}/evicted_samples"] = float(causes.total())
        record.numbers[f"{prefix}/discarded_surplus_samples"] = float(surplus)
        own = self._config.algorithm.filter_groups.filter
        for cause in [*CAUSES, *([f"filter {own}"] if own else []), *causes]:
            record.numbers[f"{prefix}/{re.sub(r'[^0-9A-Za-z]+', '_', cause)}"] = float(causes[cause])
