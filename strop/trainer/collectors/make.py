"""The collector of a run: which strategies its configuration asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from strop.rollout.types import Sampling
from strop.run import RunFolder
from strop.run.replay_schedule import StepSchedule
from strop.trainer.collectors.asynchronous import AsynchronousGroups
from strop.trainer.collectors.collector import Collector, Pacing
from strop.trainer.collectors.dynamic_sampling import GroupFilter
from strop.trainer.collectors.lead import Lead
from strop.trainer.collectors.lengths import Lengths
from strop.trainer.collectors.next_prompts import NextPrompts
from strop.trainer.collectors.over_issue import OverIssue
from strop.trainer.collectors.pacing import StalenessBound
from strop.trainer.collectors.refill import Refill
from strop.trainer.collectors.replayed import RecordedOrder
from strop.trainer.config import Config
from strop.trainer.setup import TrainingData
from strop.trainer.worker_groups import WorkerGroups


def make_collector(
    config: Config,
    run: RunFolder,
    data: TrainingData,
    roles: WorkerGroups,
    sampling: Sampling,
    *,
    start_step: int = 0,
    recorded: Mapping[int, StepSchedule] = MappingProxyType({}),
) -> Collector:
    """The collector of a run.

    Args:
        config, run, data, roles, sampling: of the run.
        start_step: steps of it that are done.
        recorded: by step, the schedule of a run that this one repeats.
    """
    lengths = Lengths() if config.rollout.longest_first else None
    prompts = NextPrompts(config, run, data, lengths, roles.rollout.world_size)
    group_filter = GroupFilter(config.algorithm.filter_groups, data.sampler)
    if not config.async_setting:
        return Collector(
            config, run, roles, sampling, prompts=prompts, group_filter=group_filter, lengths=lengths
        )
    order = RecordedOrder(recorded)
    size = config.data.prompts_per_step
    refill = Refill(config.algorithm.filter_groups, size)
    pacing: Pacing
    if config.rollout.over_issue:
        pacing = OverIssue(config, run, data)
    else:
        bound = StalenessBound(
            groups_per_step=size, max_staleness=config.rollout.max_staleness, num_steps=data.num_steps
        )
        pacing = Lead(bound, refill)
    return Collector(
        config, run, roles, sampling, prompts=prompts, group_filter=group_filter, lengths=lengths,
        groups=AsynchronousGroups(
            config, run, data, roles, sampling, start_step=start_step, spans=order.spans
        ),
        pacing=pacing, refill=refill, recorded=order,
    )  # fmt: skip


def describe_collector(config: Config) -> list[str]:
    """Lines about generation that is ahead of training: how far, and what makes up for it."""
    bound, algorithm = config.rollout.max_staleness, config.algorithm
    if not bound:
        return []
    description = (
        "the loss takes its ratio to the policy that sampled (algorithm.old_log_probs=rollout)"
        if algorithm.old_log_probs == "rollout"
        else "algorithm.correction makes up for it"
    )
    versions = f"{math.ceil(bound)} version{'s' if bound > 1 else ''}"
    lead = f"ahead: samples may be begun {versions} before the policy that learns from them; {description}"
    return [lead]
