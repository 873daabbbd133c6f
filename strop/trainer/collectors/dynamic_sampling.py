"""Dynamic sampling (DAPO): groups that cannot teach are dropped, and others sampled in their place.

The rules that judge a group are in filter_rules.py, the settings in strop.algorithms.dynamic_sampling_config.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from strop.algorithms.dynamic_sampling_config import FilterGroupsConfig
from strop.data.sampler import PromptSampler
from strop.data.visit_ids import parse_visit_uid
from strop.trainer.collectors.filter_rules import CAUSES, FAILED, SOLVED, left_out_for
from strop.utils.metrics import Metric
from strop.workers.reports import EpisodeReport
from strop.workers.reward_shaping import sample_groups

LOWEST_RATE = 0.1
"""Share of groups that is expected to teach at least, when it is chosen how many are started."""

SURPLUS = "surplus of dynamic sampling"
"""Reason of a group that can teach and is dropped."""
FILTER = Metric(
    "training/filter_groups/<what>",
    "rounds; samples; tokens",
    "with dynamic sampling: `rounds`, `evicted_samples`, `discarded_surplus_samples` and `discarded_surplus_tokens`, "
    "samples by cause",
)


class GroupFilter:
    """Judges the groups of a step, and lets the sampler know of prompts that are solved or hopeless."""

    def __init__(self, settings: FilterGroupsConfig, sampler: PromptSampler) -> None:
        self.settings, self._sampler = settings, sampler

    @property
    def is_on(self) -> bool:
        """Groups may be dropped."""
        return self.settings.enable

    def reasons(self, reports: Sequence[EpisodeReport], *, at_most: int) -> dict[str, str]:
        """By uid of each group, the reason why it is dropped; empty: it is kept.

        Args:
            reports: of whole groups.
            at_most: how many are kept; the others are surplus.
        """
        reasons: dict[str, str] = {}
        num_kept = 0
        for group in sample_groups(reports):
            cause = left_out_for(group, self.settings)
            reasons[group.uid] = cause or (SURPLUS if num_kept == at_most else "")
            num_kept += not reasons[group.uid]
            epoch, row = parse_visit_uid(group.uid)
            if cause == SOLVED and self.settings.retire_solved:
                self._sampler.retire(row, epoch)
            if cause == FAILED and self.settings.defer_failed:
                self._sampler.defer(row, epoch, epochs=self.settings.defer_failed)
        return reasons

    def metrics(
        self, dropped: Mapping[str, str], reports: Sequence[EpisodeReport], num_rounds: float
    ) -> dict[str, float]:
        """FILTER.

        Args:
            dropped: by uid, reasons.
            reports: of all samples of the step.
            num_rounds: of groups as a step trains.
        """
        uids = [report.uid for report in reports]
        causes = Counter(dropped[uid] for uid in uids if uid in dropped)
        surplus = causes.pop(SURPLUS, 0)
        tokens = sum(report.num_sampled_tokens for report in reports if dropped.get(report.uid) == SURPLUS)
        counts = {
            FILTER.of("rounds"): float(num_rounds),
            FILTER.of("evicted_samples"): float(causes.total()),
            FILTER.of("discarded_surplus_samples"): float(surplus),
            FILTER.of("discarded_surplus_tokens"): float(tokens),
        }
        custom = self.settings.filter
        for cause in [*CAUSES, *([f"filter {custom}"] if custom else []), *causes]:
            counts[FILTER.of(re.sub(r"[^0-9A-Za-z]+", "_", cause))] = float(causes[cause])
        return counts
