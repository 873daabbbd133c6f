"""The samples of a step: prompts drawn, played and scored, in one round or, with a group filter, in several.

With algorithm.filter_groups (DAPO's dynamic sampling) a step goes on asking for prompts until it has as many
groups that can teach as data.prompts_per_step, or has asked `max_rounds` times. The batch that is trained has a
constant number of prompts then, except at that limit.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch

from strop.algorithms.group_filter import CAUSES, FAILED, SOLVED, left_out_for
from strop.algorithms.registry import STEP_COLUMNS
from strop.base.metrics import Metric
from strop.data.drawing import Drawn, draw
from strop.data.sampler import parse_visit_uid
from strop.protocol import DataProto, future_of
from strop.protocol.schema import made_by
from strop.rewards import check_failed_share
from strop.rollout.types import Sampling
from strop.run import Fate, RunFolder
from strop.trainer.config import Config
from strop.trainer.experience import Experience
from strop.trainer.groups import sample_groups, shaped_by_group
from strop.trainer.lengths import FILE, Lengths
from strop.trainer.roles import Roles
from strop.trainer.setup import TrainingData
from strop.trainer.stages import Stages
from strop.trajectory import Prompt
from strop.workers.reports import EpisodeReport, check_failed_episodes, training_rewards

LOWEST_RATE = 0.1
"""Share of groups that is expected to teach at least, when it is chosen how many are begun."""

SURPLUS = "surplus of dynamic sampling"
"""Why a group that can teach is left out."""
OVERLONG_PROMPTS = Metric("training/overlong_prompts", "prompts", "passed over with `data.streaming`")
FILTER = Metric(
    "training/filter_groups/<what>",
    "rounds; samples; tokens",
    "with dynamic sampling: `rounds`, `evicted_samples`, `discarded_surplus_samples` and `discarded_surplus_tokens`, "
    "samples by cause",
)


class TooFewGroups(RuntimeError):
    """Dynamic sampling came to its limit without enough groups, and was told to stop there."""


def training_rows(config: Config, roles: Roles, episodes: Experience, sampling: Sampling) -> Experience:
    """The samples that can be trained on, with their rewards.

    Args:
        config, roles: of the run.
        episodes: samples, those of a prompt together.
        sampling: how they were played.
    """
    played, limit = episodes.reports, sampling.max_tokens
    rewards = training_rewards(played, config.reward, max_response_tokens=limit)
    if config.algorithm.reward_shaping:
        rewards = shaped_by_group(config, played, rewards, limit)
    kept = episodes.take([number for number, one in enumerate(played) if one.id in rewards])
    column = torch.tensor([rewards[one.id] for one in kept.reports], dtype=torch.float64)
    given = kept.rows.union(DataProto.from_dict({"reward": column}))
    reports = tuple(row for one in kept.reports for row in one.rows())
    left_out = {"reward_baselines"} | (set() if config.algorithm.reward_keys else {"reward_parts"})
    left_out |= set() if config.compares_answers else STEP_COLUMNS
    return Experience(
        rows=future_of(roles.rollout.call.rows(cast(DataProto, given))),
        reports=reports,
        column_names=made_by("rollout") - left_out,
        num_trained=tuple(report.num_sampled_tokens for report in reports),
    )


@dataclass(frozen=True, kw_only=True)
class CollectedSamples:
    """The samples of one step, or of one round of it."""

    prompts: tuple[Prompt, ...]
    num_refused: int
    """Visits that were passed over, because their prompt is too long."""
    episodes: Experience
    """All samples, also those that are not trained on."""
    experience: Experience
    """Those that are."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Uids of the groups that dynamic sampling left out, with the cause."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class RolloutCollector:
    """Fills steps with samples."""

    def __init__(
        self, config: Config, run: RunFolder, data: TrainingData, roles: Roles, sampling: Sampling
    ) -> None:
        self._config, self._run, self._data, self._roles = config, run, data, roles
        self._sampling = sampling
        self._lengths = Lengths() if config.rollout.longest_first else None

    def collect(self, step: int, stages: Stages) -> CollectedSamples:
        """The samples of a step.

        Args:
            step: from 1.
            stages: of the step, where models look at samples before all have ended.

        Raises:
            EpisodesFailed, RewardError: too many samples failed.
            TooFewGroups: filter_groups.at_limit is stop, and the limit was reached.
        """
        settings = self._config.algorithm.filter_groups
        wanted = self._config.data.prompts_per_step
        if not settings.enable:
            collected = self._round(step, wanted)
            return replace(
                collected, metrics={**collected.metrics, **self._noted(collected.episodes.reports)}
            )
        rounds: list[CollectedSamples] = []
        causes: dict[str, str] = {}
        found, rate = 0, 1.0
        while found < wanted and len(rounds) < settings.max_rounds:
            missing = min(wanted, math.ceil((wanted - found) / rate))
            rounds.append(self._round(step, settings.prompts_per_round or missing))
            causes |= self._filter(rounds[-1].episodes.reports, at_most=wanted - found)
            found = sum(not cause for cause in causes.values())
            rate = max(found / sum(len(one.prompts) for one in rounds), LOWEST_RATE)
        dropped = {uid: cause for uid, cause in causes.items() if cause}
        if found < wanted and settings.at_limit == "stop":
            raise TooFewGroups(
                f"only {found} of {wanted} groups could teach after {len(rounds)} rounds "
                f"({', '.join(f'{n} {cause}' for cause, n in Counter(dropped.values()).items())}): use data "
                f"of another difficulty, raise algorithm.filter_groups.max_rounds, or set at_limit=train"
            )
        reports = [report for one in rounds for report in one.episodes.reports]
        metrics = self._counts(dropped, reports, len(rounds)) | self._noted(reports)
        return self._joined(rounds, dropped, metrics)

    def texts(self) -> dict[str, str]:
        """Files of a checkpoint, by name, without which something would be lost."""
        return {} if self._lengths is None else {FILE: self._lengths.text()}

    def begin_again(self, checkpoint: Path | None) -> list[str]:
        """Go on with what was in play at a checkpoint; sentences that say so."""
        if self._lengths is not None and checkpoint is not None:
            self._lengths.restore(checkpoint / FILE)
        return []

    def _in_order(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """The prompts in the order in which they are begun."""
        if self._lengths is None:
            return prompts
        return self._lengths.longest_first(prompts, ranks=self._roles.rollout.world_size)

    def _noted(self, reports: Sequence[EpisodeReport]) -> dict[str, float]:
        """Learn from all samples of a step; metrics of it."""
        if self._lengths is not None:
            self._lengths.note(reports)
        return {}

    def _joined(
        self, rounds: Sequence[CollectedSamples], dropped: Mapping[str, str], metrics: Mapping[str, float]
    ) -> CollectedSamples:
        """All rounds, without the samples of dropped groups."""
        num_refused = sum(one.num_refused for one in rounds)
        experience = Experience.concat([one.experience for one in rounds])
        if dropped:
            kept = [row for row, report in enumerate(experience.reports) if report.uid not in dropped]
            experience = experience.take(kept)
        return CollectedSamples(
            prompts=tuple(prompt for one in rounds for prompt in one.prompts),
            num_refused=num_refused,
            episodes=Experience.concat([one.episodes for one in rounds]),
            experience=experience,
            dropped=dropped,
            metrics={**metrics, **self._passed_over(num_refused)},
        )

    def _passed_over(self, num_refused: int) -> dict[str, float]:
        """How many visits were passed over, where that may happen."""
        return {OVERLONG_PROMPTS: float(num_refused)} if self._config.data.streaming else {}

    def _round(self, step: int, num_prompts: int) -> CollectedSamples:
        """Prompts of the next visits, played; they count as consumed, with those that were passed over."""
        drawn = self._issue(step, num_prompts)
        prompts = drawn.prompts
        baselines = self._greedy_rewards(prompts) if self._config.needs("reward_baselines") else {}
        count = self._config.rollout.samples_per_prompt
        begun = prompts if self._lengths is None else self._in_order(prompts)
        episodes = self._roles.play(begun, count, self._sampling)
        if begun is not prompts:
            places = {prompt.uid: place for place, prompt in enumerate(begun)}
            episodes = episodes.take([places[one.uid] * count + i for one in prompts for i in range(count)])
        self._check(episodes.reports)
        experience = training_rows(self._config, self._roles, episodes, self._sampling)
        if self._config.needs("reward_baselines") and experience.reports:
            experience = experience.union(self._baselines(experience, baselines), "reward_baselines")
        return CollectedSamples(
            prompts=tuple(prompts),
            num_refused=len(drawn.refused),
            episodes=episodes,
            experience=experience,
            metrics=self._passed_over(len(drawn.refused)),
        )

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

    def _greedy_rewards(self, prompts: list[Prompt]) -> dict[str, float | None]:
        """By uid: the reward of the greedy answer, ReMax's baseline."""
        greedy = replace(self._sampling, temperature=0.0, top_p=1.0, top_k=0)
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

    def _check(self, reports: Sequence[EpisodeReport]) -> None:
        """Too many samples that failed, or could not be scored, end the run."""
        check_failed_episodes(reports)
        outcomes = [report.outcome for report in reports if report.outcome is not None]
        reward = self._config.reward
        check_failed_share(outcomes, max_failed_share=reward.max_failed_share, timeout_s=reward.timeout_s)

    def _filter(self, reports: Sequence[EpisodeReport], *, at_most: int) -> dict[str, str]:
        """By uid of each group of a round, why it is left out (empty: it is not); the sampler hears of it."""
        settings = self._config.algorithm.filter_groups
        causes: dict[str, str] = {}
        num_kept = 0
        for group in sample_groups(reports):
            cause = left_out_for(group, settings)
            causes[group.uid] = cause or (SURPLUS if num_kept == at_most else "")
            num_kept += not causes[group.uid]
            epoch, row = parse_visit_uid(group.uid)
            if cause == SOLVED and settings.retire_solved:
                self._data.sampler.retire(row, epoch)
            if cause == FAILED and settings.defer_failed:
                self._data.sampler.defer(row, epoch, epochs=settings.defer_failed)
        return causes

    def _counts(
        self, dropped: Mapping[str, str], reports: Sequence[EpisodeReport], num_rounds: float
    ) -> dict[str, float]:
        """Metrics of the filter."""
        uids = [report.uid for report in reports]
        causes = Counter(dropped[uid] for uid in uids if uid in dropped)
        surplus = causes.pop(SURPLUS, 0)
        tokens = sum(one.num_sampled_tokens for one in reports if dropped.get(one.uid) == SURPLUS)
        counts = {
            FILTER.of("rounds"): float(num_rounds),
            FILTER.of("evicted_samples"): float(causes.total()),
            FILTER.of("discarded_surplus_samples"): float(surplus),
            FILTER.of("discarded_surplus_tokens"): float(tokens),
        }
        own = self._config.algorithm.filter_groups.filter
        for cause in [*CAUSES, *([f"filter {own}"] if own else []), *causes]:
            counts[FILTER.of(re.sub(r"[^0-9A-Za-z]+", "_", cause))] = float(causes[cause])
        return counts
