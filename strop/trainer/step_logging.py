"""Step metrics and warnings: lost engines, skipped updates, failed episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from strop.algorithms.batch_metrics import GROUPS
from strop.controller import as_list
from strop.data.config import DataConfig
from strop.engines.flops import usage_metrics
from strop.engines.flops.usage import Usage
from strop.rewards import summarize
from strop.run import RunFolder
from strop.trainer.callbacks import Reporter
from strop.trainer.records import StepRecord
from strop.trainer.timing import Stages
from strop.trainer.worker_groups import WorkerGroups
from strop.utils.metrics import Metric
from strop.workers import metrics as measure
from strop.workers.reports import EpisodeReport

POSITION = Metric("training/{global_step,epoch}", "", "where the run is")
ENGINE_IDLE = Metric(
    "rollout/engine_idle_ratio",
    "1",
    "share of the engines' time without a request, over the rollout processes of a router, since the step before",
)
TAKEN_OVER = Metric(
    "rollout/requests_taken_over",
    "requests",
    "served by another rollout process, in whole or in part, since then",
)
GENERATION_SPEED = Metric("rollout/tokens_per_s", "tokens/s", "generated")


def step_metrics(
    record: StepRecord, stages: Stages, roles: WorkerGroups, *, epoch: int, limits: DataConfig
) -> dict[str, float]:
    """All numbers of a step that do not depend on what follows it; `limits` are those of prompts and responses."""
    metrics = {
        POSITION.of("global_step"): float(record.step),
        POSITION.of("epoch"): float(epoch),
        **measure.episode_metrics(
            record.reports,
            max_prompt_tokens=limits.max_prompt_tokens,
            max_response_tokens=limits.max_response_tokens,
        ),
        **measure.throughput_metrics(
            num_total_tokens=record.num_tokens,
            step_s=stages.total(),
            num_devices=roles.actor.world_size,
        ),
    }
    generated, gen_s = record.num_response_tokens, stages.seconds.get("gen", 0.0)
    if gen_s > 0:
        metrics[GENERATION_SPEED] = generated / gen_s
    if roles.router is not None:
        routing = roles.router.take_stats()
        metrics[ENGINE_IDLE] = routing.idle_share
        metrics[TAKEN_OVER] = float(routing.num_taken_over)
    if roles.workers is not None:
        metrics |= roles.workers.metrics()
    usage: dict[str, list[Usage]] = {
        name: as_list(group.call.usage()) for name, group in roles.trained().items()
    }
    metrics |= usage_metrics(usage, stages.seconds, actor_is_reference=roles.reference is None)
    metrics |= roles.sync.metrics()
    return metrics | told_by_passes(record.metrics(), record.batch.reports)


def told_by_passes(metrics: dict[str, float], reports: Sequence[EpisodeReport]) -> dict[str, float]:
    """The metrics with GROUPS of one reward told apart by who passes: solved where every sample does, failed where none
    does, else equal. Whether an answer passes is not said by its reward, which alone is known where the rows are.

    Args:
        metrics: of a step.
        reports: of its samples that were trained on.
    """
    names = [GROUPS.of(kind) for kind in ("all_max", "all_min", "all_equal")]
    if not set(names) <= metrics.keys():
        return metrics
    groups: dict[str, dict[str, EpisodeReport]] = {}
    for report in reports:
        groups.setdefault(report.uid, {})[report.episode_id] = report
    by_reward, by_passes = Counter[str](), Counter[str]()
    for group in groups.values():
        rewards = {report.reward() for report in group.values()}
        if len(group) < 2 or len(rewards) > 1 or None in rewards:
            continue
        (reward,) = rewards
        passes = {report.passes for report in group.values()}
        by_reward[names[0] if (reward or 0.0) >= 1 else names[1] if (reward or 0.0) <= 0 else names[2]] += 1
        by_passes[names[0] if passes == {True} else names[1] if passes == {False} else names[2]] += 1
    if by_reward == by_passes:
        return metrics
    share = sum(metrics[name] for name in names)
    return metrics | {name: share * by_passes[name] / by_passes.total() for name in names}


def log_failures(
    record: StepRecord, roles: WorkerGroups, run: RunFolder, say: Reporter, *, timeout_s: float
) -> None:
    """Report the engines, updates, episodes and scores that a step has lost; `timeout_s` is that of scores."""
    failures = as_list(roles.rollout.call.pop_engine_failures())
    for message in (message for messages in failures for message in messages):
        run.events.append("engine_lost", record.step, message=message)
        say(f"step {record.step}: {message}")
    for reason in record.skipped:
        run.events.append("skipped_update", record.step, reason=reason)
        say(f"step {record.step} skipped an update: {reason}")
    failed = [report for report in record.reports if not report.is_finished]
    if failed:
        say(
            f"step {record.step}: {len(failed)} of {len(record.reports)} episodes failed; the first one, "
            f"{failed[0].id}: {failed[0].failure}"
        )
    silent = [
        report
        for report in record.reports
        if report.is_finished and not report.num_sampled_tokens and report.stop_reason != "aborted"
    ]
    if silent:
        say(
            f"step {record.step}: {len(silent)} of {len(record.reports)} samples have no token of the model and are "
            f"not trained; the first one, {silent[0].id}: {silent[0].stop_reason}"
        )
    outcomes = [report.outcome for report in record.reports if report.outcome is not None]
    if any(outcome.kind != "score" for outcome in outcomes):
        say(f"step {record.step}: {summarize(outcomes, timeout_s=timeout_s)}")
