"""The numbers of a step under the names that people already chart.

Every function is pure and returns `{name: number}`; a statistic over nothing is left out, never 0 or NaN.
Each name says in its function over what it averages: tokens, samples, groups or prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from strop.algorithms.batch_metrics import Metrics, Numbers, doubles, mean_max_min
from strop.rewards.outcome import KINDS, OutcomeKind
from strop.utils.metrics import Metric

if TYPE_CHECKING:
    from strop.workers.reports import EpisodeReport

PHASES_OVER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")
"""Phases whose time is also given per token of prompt and response; `gen` is per response token."""

LENGTH = Metric(
    "{prompt_length,response_length,response_length_non_aborted}/{mean,max,min,clip_ratio}",
    "tokens; share",
    "over samples; `clip_ratio`: those that reach the configured limit, or whose stop reason is `length`, as of "
    "episodes that a first observation or a result that does not fit brings there sooner",
)
VALIDATION = Metric(
    "{val-core,val-aux}/<data source>/<variable>/<statistic>",
    "",
    "mean over prompts of `mean@N`, `std@N`, `best@k/mean`, `worst@k/mean`, `maj@k/mean`, `pass@k/mean`, ... of N "
    "samples that have the variable, in `pass@k` of `acc` of all; `val-core`: of `acc`, else `reward`, at k = N",
)
OF_VALIDATION = Metric(
    "val-core/{pass_rate,mean_reward}",
    "share; reward",
    "over all answers of a validation: those that pass, only where something decides which do; mean score",
)
PASS_RATE, MEAN_REWARD = OF_VALIDATION.of("pass_rate"), OF_VALIDATION.of("mean_reward")
ABORTED = Metric("response/aborted_ratio", "share", "of samples that were stopped from outside")
TURNS = Metric("num_turns/{mean,max,min}", "turns", "over samples")
AGENT_TIME = Metric(
    "timing_s/agent_loop/{generate_sequences,tool_calls,compute_score}/{mean,max,min}", "s", "over samples"
)
SLOWEST = Metric(
    "timing_s/agent_loop/slowest/{generate_sequences,tool_calls,compute_score,prompt_length,response_length}",
    "s; tokens",
    "of the sample that took longest in all",
)
AGENT_NUMBER = Metric(
    "<number>/{mean,max,min}",
    "",
    "what agents count, over the samples that have it: `tool_call_counts`, `tool_rewards`, `tool_errors`, "
    "`template_drift`, `env_steps`, ..., and of each tool, over the samples that called it, "
    "`tools/<name>/{calls,errors,seconds,result_tokens}` ([agents.md](agents.md))",
)
TIMING = Metric(
    "timing_s/{gen,reward_model,old_log_prob,correction,ref,values,prm_ref,prm,adv,teacher,update_prm,"
    "update_critic,update_actor,summary,update_weights,testing,save_checkpoint,step}",
    "s",
    "of each phase of a step, and of the whole",
)
TIMING_PER_TOKEN = Metric(
    "timing_per_token_ms/{gen,ref,values,adv,update_critic,update_actor}",
    "ms",
    "`gen` per response token, the others per token of prompt and response",
)
NUM_TOKENS = Metric("perf/total_num_tokens", "tokens", "of all prompts and responses of a step")
STEP_TIME = Metric("perf/time_per_step", "s", "without validation and checkpoint")
THROUGHPUT = Metric("perf/throughput", "tokens/s", "of prompts and responses; of `strop train` per device")
OUTCOMES = Metric(
    "reward/{ok,error,timeout,infrastructure}",
    "samples",
    "that were scored, and that were not ([rewards.md](rewards.md#timeouts-and-failures))",
)
OUTCOME_SHARES = Metric(
    "reward/{ok,error,timeout,infrastructure}_share", "share", "of all samples to be scored"
)
REWARD_PART = Metric(
    "reward/<part>/mean", "", "each number that the reward functions return, over scored samples"
)
SOURCE_REWARD_PART = Metric(
    "reward/<data source>/<part>/mean", "", "the same by data source, where there are several"
)
REWARD_USAGE = Metric(
    "reward/<service>/<usage>",
    "",
    "sums of `requests`, `retries`, `cached`, `input_tokens`, `output_tokens`, `cost`, `wait_s` of the services "
    "`judge` and `server`",
)

FAILED_EPISODES = Metric("rollout/failed", "samples", "whose agent failed")


def episode_metrics(
    reports: Sequence[EpisodeReport], *, max_prompt_tokens: int, max_response_tokens: int
) -> Metrics:
    """Lengths, turns and outcomes of the episodes; the limits are those that are configured."""
    finished = [report for report in reports if report.is_finished]
    outcomes = [(report.data_source, report.outcome) for report in reports if report.outcome is not None]
    return {
        **length_metrics(
            prompt_lengths=[report.num_prompt_tokens for report in finished],
            response_lengths=[report.num_response_tokens for report in finished],
            is_aborted=[report.stop_reason == "aborted" for report in finished],
            is_cut=[report.stop_reason == "length" for report in finished],
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
        ),
        **mean_max_min(TURNS, [report.num_turns for report in finished]),
        **agent_loop_metrics(
            [_seconds_of(report) for report in finished],
            [(report.num_prompt_tokens, report.num_response_tokens) for report in finished],
        ),
        **agent_number_metrics([report.numbers for report in finished]),
        **reward_outcome_metrics([outcome.kind for _, outcome in outcomes]),
        **reward_part_metrics(
            [source for source, outcome in outcomes if outcome.score is not None],
            [outcome.parts for _, outcome in outcomes if outcome.score is not None],
        ),
        **reward_usage_metrics([outcome.usage for _, outcome in outcomes]),
        FAILED_EPISODES: float(len(reports) - len(finished)),
    }


def _seconds_of(report: EpisodeReport) -> dict[str, float]:
    """Time of one sample per activity, under verl's names."""
    return {
        "generate_sequences": report.timings.get("generate_s", 0.0),
        "tool_calls": report.timings.get("tool_calls", 0.0),
        "compute_score": 0.0 if report.outcome is None else report.outcome.seconds,
    }


def length_metrics(
    *,
    prompt_lengths: Numbers,
    response_lengths: Numbers,
    is_aborted: Sequence[bool],
    is_cut: Sequence[bool],
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> Metrics:
    """LENGTH and ABORTED. A clip ratio is the share of samples that reach the
    *configured* limit; measured against the longest sample of the batch, one would always count as clipped.

    Args:
        prompt_lengths, response_lengths, is_aborted: of each sample.
        is_cut: its end says that the limit on responses was its reason.
        max_prompt_tokens, max_response_tokens: the limits.
    """
    prompts, responses = doubles(prompt_lengths), doubles(response_lengths)
    aborted = doubles(is_aborted).bool()
    clipped = (responses >= max_response_tokens) | doubles(is_cut).bool()
    metrics: Metrics = {
        **_lengths("prompt_length", prompts, prompts >= max_prompt_tokens),
        **_lengths("response_length", responses, clipped),
        **_lengths("response_length_non_aborted", responses[~aborted], clipped[~aborted]),
    }
    if aborted.numel():
        metrics[ABORTED] = float(aborted.double().mean())
    return metrics


def agent_loop_metrics(seconds: Sequence[Mapping[str, float]], lengths: Sequence[tuple[int, int]]) -> Metrics:
    """AGENT_TIME and SLOWEST.

    Args:
        seconds: per sample, by those names; 0 where one is missing.
        lengths: per sample, tokens of prompt and response.
    """
    if not seconds:
        return {}
    names = ("generate_sequences", "tool_calls", "compute_score")
    metrics: Metrics = {}
    for name in names:
        metrics |= mean_max_min(AGENT_TIME, [timings.get(name, 0.0) for timings in seconds], name)
    slowest = max(range(len(seconds)), key=lambda i: sum(seconds[i].get(name, 0.0) for name in names))
    for name in names:
        metrics[SLOWEST.of(name)] = seconds[slowest].get(name, 0.0)
    metrics[SLOWEST.of("prompt_length")] = float(lengths[slowest][0])
    metrics[SLOWEST.of("response_length")] = float(lengths[slowest][1])
    return metrics


def agent_number_metrics(numbers: Sequence[Mapping[str, float]]) -> Metrics:
    """AGENT_NUMBER, for each of their names."""
    names = sorted({name for counts in numbers for name in counts})
    metrics: Metrics = {}
    for name in names:
        metrics |= mean_max_min(AGENT_NUMBER, [counts[name] for counts in numbers if name in counts], name)
    return metrics


def timing_metrics(
    seconds: Mapping[str, float], *, num_response_tokens: int, num_total_tokens: int
) -> Metrics:
    """TIMING of every phase, and TIMING_PER_TOKEN where tokens explain the time: 0.0 without tokens."""
    metrics = {TIMING.of(phase): float(value) for phase, value in seconds.items()}
    counts = {"gen": num_response_tokens, **dict.fromkeys(PHASES_OVER_ALL_TOKENS, num_total_tokens)}
    for phase, count in counts.items():
        if phase in seconds:
            metrics[TIMING_PER_TOKEN.of(phase)] = 1000 * seconds[phase] / count if count else 0.0
    return metrics


def throughput_metrics(*, num_total_tokens: int, step_s: float, num_devices: int) -> Metrics:
    """NUM_TOKENS, STEP_TIME and THROUGHPUT."""
    metrics: Metrics = {NUM_TOKENS: float(num_total_tokens), STEP_TIME: float(step_s)}
    if step_s > 0:
        metrics[THROUGHPUT] = num_total_tokens / (step_s * num_devices)
    return metrics


def reward_outcome_metrics(kinds: Sequence[OutcomeKind]) -> Metrics:
    """OUTCOMES and OUTCOME_SHARES: how many samples were scored, and how many were not and why."""
    counts = Counter(kinds)
    metrics: Metrics = {}
    for kind in KINDS:
        name = "ok" if kind == "score" else kind
        metrics[OUTCOMES.of(name)] = float(counts[kind])
        if kinds:
            metrics[OUTCOME_SHARES.of(name)] = counts[kind] / len(kinds)
    return metrics


def reward_part_metrics(sources: Sequence[str], parts: Sequence[Mapping[str, float | str | bool]]) -> Metrics:
    """REWARD_PART over the samples that have the part as a number, and SOURCE_REWARD_PART.

    Args:
        sources, parts: data source and parts of each scored sample.
    """
    values: dict[str, list[float]] = {}
    names = [""] if len(set(sources)) < 2 else ["", *sorted(set(sources))]
    for source, of_sample in zip(sources, parts, strict=True):
        for part, value in of_sample.items():
            if isinstance(value, str) or not math.isfinite(value):
                continue
            for name in names:
                if name in ("", source):
                    key = SOURCE_REWARD_PART.of(name, part) if name else REWARD_PART.of(part)
                    values.setdefault(key, []).append(float(value))
    return {key: math.fsum(values[key]) / len(values[key]) for key in sorted(values)}


def reward_usage_metrics(usage: Sequence[Mapping[str, float]]) -> Metrics:
    """REWARD_USAGE: what scoring used up, by `service/usage`, added over samples."""
    names = sorted({name for counts in usage for name in counts})
    return {
        REWARD_USAGE.of(*name.split("/", 1)): math.fsum(counts.get(name, 0.0) for counts in usage)
        for name in names
    }


def _lengths(label: str, lengths: Tensor, is_clipped: Tensor) -> Metrics:
    if not lengths.numel():
        return {}
    return {
        **mean_max_min(LENGTH, lengths, label),
        LENGTH.of(label, "clip_ratio"): float(is_clipped.double().mean()),
    }
