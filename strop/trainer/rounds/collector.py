"""Dynamic sampling (DAPO): algorithm.filter_groups; and which prompts a step begins with: rollout.longest_first.

With dynamic sampling a step goes on asking for prompts until it has as many groups that can teach as
data.prompts_per_step, or has asked `max_rounds` times. The batch that is trained has a constant number of prompts then,
except at that limit.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from strop.data.sampler import parse_visit_uid
from strop.rollout.types import Sampling
from strop.run import RunFolder
from strop.trainer.collecting import RolloutCollector, TooFewGroups
from strop.trainer.config import Config
from strop.trainer.group_filter import CAUSES, FAILED, SOLVED, left_out_for
from strop.trainer.records import StepRecord
from strop.trainer.rollout_batch import Experience
from strop.trainer.rounds.lengths import Lengths
from strop.trainer.setup import TrainingData
from strop.trainer.timing import Stages
from strop.trainer.worker_groups import Roles
from strop.utils.metrics import Metric
from strop.workers.reports import EpisodeReport
from strop.workers.reward_shaping import sample_groups

LOWEST_RATE = 0.1
"""Share of groups that is expected to teach at least, when it is chosen how many are begun."""

SURPLUS = "surplus of dynamic sampling"
"""Why a group that can teach is left out."""
FILTER = Metric(
    "training/filter_groups/<what>",
    "rounds; samples; tokens",
    "with dynamic sampling: `rounds`, `evicted_samples`, `discarded_surplus_samples` and `discarded_surplus_tokens`, "
    "samples by cause",
)


class RoundsCollector(RolloutCollector):
    """Fills steps with groups that can teach, where there is a filter; begins with long ones, where that is asked."""

    def __init__(
        self, config: Config, run: RunFolder, data: TrainingData, roles: Roles, sampling: Sampling
    ) -> None:
        """As RolloutCollector."""
        super().__init__(config, run, data, roles, sampling)
        self._filtering = config.algorithm.filter_groups
        self._lengths = Lengths() if config.rollout.longest_first else None
        if self._lengths is not None:
            self._first = partial(self._lengths.longest_first, ranks=roles.rollout.world_size)

    def texts(self) -> dict[str, str]:
        """As RolloutCollector: how long answers were."""
        return {} if self._lengths is None else {Lengths.FILE: self._lengths.text()}

    def begin_again(self, checkpoint: Path | None) -> list[str]:
        """As RolloutCollector."""
        if self._lengths is not None and checkpoint is not None:
            self._lengths.restore(checkpoint / Lengths.FILE)
        return []

    def _round(self, step: int, stages: Stages, num_prompts: int | None) -> StepRecord:
        """As RolloutCollector's `collect`; how long answers were is remembered."""
        collected = super().collect(step, stages, num_prompts)
        if self._lengths is not None:
            self._lengths.note(collected.reports)
        return collected

    def collect(self, step: int, stages: Stages, num_prompts: int | None = None) -> StepRecord:
        """As RolloutCollector, in rounds.

        Raises:
            TooFewGroups: filter_groups.at_limit is stop, and the limit was reached.
        """
        settings = self._filtering
        if not settings.enable:
            return self._round(step, stages, num_prompts)
        wanted = self._config.data.prompts_per_step
        rounds: list[StepRecord] = []
        causes: dict[str, str] = {}
        found, rate = 0, 1.0
        while found < wanted and len(rounds) < settings.max_rounds:
            missing = min(wanted, math.ceil((wanted - found) / rate))
            rounds.append(self._round(step, stages, settings.prompts_per_round or missing))
            causes |= self._filter(rounds[-1].episodes.reports, at_most=wanted - found)
            found = sum(not cause for cause in causes.values())
            rate = max(found / sum(len(one.prompts) for one in rounds), LOWEST_RATE)
        dropped = {uid: cause for uid, cause in causes.items() if cause}
        if found < wanted and settings.at_limit == "stop":
            raise TooFewGroups(
                f"only {found} of {wanted} groups could teach after {len(rounds)} rounds "
                f"({', '.join(f'{n} {cause}' for cause, n in Counter(dropped.values()).items())}): use data "
                f"of another difficulty, raise algorithm.filter_groups.max_rounds, or set "
                f"algorithm.filter_groups.at_limit=train"
            )
        reports = [report for one in rounds for report in one.episodes.reports]
        return self._joined(rounds, dropped, self._counts(dropped, reports, len(rounds)))

    def _joined(
        self, rounds: Sequence[StepRecord], dropped: Mapping[str, str], metrics: Mapping[str, float]
    ) -> StepRecord:
        """All rounds, without the samples of dropped groups."""
        passed_over = {
            name: sum(one.collection_metrics[name] for one in rounds) for name in rounds[0].collection_metrics
        }
        experience = Experience.concat([one.experience for one in rounds])
        if dropped:
            kept = [row for row, report in enumerate(experience.reports) if report.uid not in dropped]
            experience = experience.take(kept)
        return StepRecord(
            step=rounds[0].step,
            prompts=tuple(prompt for one in rounds for prompt in one.prompts),
            episodes=Experience.concat([one.episodes for one in rounds]),
            experience=experience,
            dropped=dropped,
            collection_metrics={**metrics, **passed_over},
        )

    def _filter(self, reports: Sequence[EpisodeReport], *, at_most: int) -> dict[str, str]:
        """By uid of each group of a round, why it is left out (empty: it is not); the sampler hears of it."""
        settings = self._filtering
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
        own = self._filtering.filter
        for cause in [*CAUSES, *([f"filter {own}"] if own else []), *causes]:
            counts[FILTER.of(re.sub(r"[^0-9A-Za-z]+", "_", cause))] = float(causes[cause])
        return counts
