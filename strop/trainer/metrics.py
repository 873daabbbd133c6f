"""The numbers of a step under the names that people already chart, from plain tensors.

Every function is pure and returns `{name: number}`; a statistic over nothing is left out, never 0 or NaN.
Each name says in its function over what it averages: tokens, samples, groups or prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from strop.algorithms.measures import Metrics, Numbers, doubles, spread
from strop.rewards.outcome import KINDS, OutcomeKind

PHASES_OVER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")
"""Phases whose time is also given per token of prompt and response; `gen` is per response token."""


def length_metrics(
    *,
    prompt_lengths: Numbers,
    response_lengths: Numbers,
    is_aborted: Sequence[bool],
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> Metrics:
    """{prompt_length,response_length,response_length_non_aborted}/{mean,max,min,clip_ratio}.

    Also response/aborted_ratio. Means are over samples. A clip ratio is the share of samples that reach the
    *configured* limit; measured against the longest sample of the batch, one would always count as clipped.
    """
    responses, aborted = doubles(response_lengths), doubles(is_aborted).bool()
    metrics = {
        **_lengths("prompt_length", doubles(prompt_lengths), max_prompt_tokens),
        **_lengths("response_length", responses, max_response_tokens),
        **_lengths("response_length_non_aborted", responses[~aborted], max_response_tokens),
    }
    if aborted.numel():
        metrics["response/aborted_ratio"] = float(aborted.double().mean())
    return metrics


def turn_metrics(num_turns: Numbers) -> Metrics:
    """num_turns/{min,max,mean} over samples."""
    return spread("num_turns", num_turns)


def agent_loop_metrics(seconds: Sequence[Mapping[str, float]], lengths: Sequence[tuple[int, int]]) -> Metrics:
    """timing_s/agent_loop/{generate_sequences,tool_calls,compute_score}/{min,max,mean} over samples.

    Also timing_s/agent_loop/slowest/{...,prompt_length,response_length} of the sample that took longest in all.

    Args:
        seconds: per sample, by those names; 0 where one is missing.
        lengths: per sample, tokens of prompt and response.
    """
    if not seconds:
        return {}
    prefix = "timing_s/agent_loop"
    names = ("generate_sequences", "tool_calls", "compute_score")
    metrics: Metrics = {}
    for name in names:
        metrics |= spread(f"{prefix}/{name}", [one.get(name, 0.0) for one in seconds])
    slowest = max(range(len(seconds)), key=lambda i: sum(seconds[i].get(name, 0.0) for name in names))
    for name in names:
        metrics[f"{prefix}/slowest/{name}"] = seconds[slowest].get(name, 0.0)
    metrics[f"{prefix}/slowest/prompt_length"] = float(lengths[slowest][0])
    metrics[f"{prefix}/slowest/response_length"] = float(lengths[slowest][1])
    return metrics


def agent_number_metrics(numbers: Sequence[Mapping[str, float]]) -> Metrics:
    """{name}/{min,max,mean} of what agents counted, over the samples that have it: tool_call_counts, tool_rewards,
    tool_errors, template_drift."""
    names = sorted({name for one in numbers for name in one})
    metrics: Metrics = {}
    for name in names:
        metrics |= spread(name, [one[name] for one in numbers if name in one])
    return metrics


def timing_metrics(
    seconds: Mapping[str, float], *, num_response_tokens: int, num_total_tokens: int
) -> Metrics:
    """timing_s/{phase} for every phase, and timing_per_token_ms/{phase} where tokens explain the time.

    `gen` is divided by response tokens, the others by the tokens of prompt and response; 0.0 without tokens.
    """
    metrics = {f"timing_s/{phase}": float(value) for phase, value in seconds.items()}
    counts = {"gen": num_response_tokens, **dict.fromkeys(PHASES_OVER_ALL_TOKENS, num_total_tokens)}
    for phase, count in counts.items():
        if phase in seconds:
            metrics[f"timing_per_token_ms/{phase}"] = 1000 * seconds[phase] / count if count else 0.0
    return metrics


def throughput_metrics(*, num_total_tokens: int, step_s: float, num_devices: int) -> Metrics:
    """perf/{total_num_tokens,time_per_step,throughput}; throughput in tokens per second and device."""
    metrics = {"perf/total_num_tokens": float(num_total_tokens), "perf/time_per_step": float(step_s)}
    if step_s > 0:
        metrics["perf/throughput"] = num_total_tokens / (step_s * num_devices)
    return metrics


def reward_outcome_metrics(kinds: Sequence[OutcomeKind]) -> Metrics:
    """reward/{ok,error,timeout,infrastructure}: how many samples were scored, and how many were not and why.

    Also reward/{...}_share of all samples that were to be scored.
    """
    counts = Counter(kinds)
    metrics: Metrics = {}
    for kind in KINDS:
        name = "ok" if kind == "score" else kind
        metrics[f"reward/{name}"] = float(counts[kind])
        if kinds:
            metrics[f"reward/{name}_share"] = counts[kind] / len(kinds)
    return metrics


def reward_part_metrics(sources: Sequence[str], parts: Sequence[Mapping[str, float | str | bool]]) -> Metrics:
    """reward/{part}/mean over the samples that have the part as a number, and reward/{source}/{part}/mean where there
    are several data sources.

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
                    key = f"reward/{name}/{part}/mean" if name else f"reward/{part}/mean"
                    values.setdefault(key, []).append(float(value))
    return {key: math.fsum(values[key]) / len(values[key]) for key in sorted(values)}


def reward_usage_metrics(usage: Sequence[Mapping[str, float]]) -> Metrics:
    """reward/{name}: what scoring used up, added over samples: judge/{requests,retries,cached,input_tokens,
    output_tokens,cost,wait_s}, server/{...}."""
    names = sorted({name for one in usage for name in one})
    return {f"reward/{name}": math.fsum(one.get(name, 0.0) for one in usage) for name in names}


def _lengths(prefix: str, lengths: Tensor, limit: int) -> Metrics:
    if not lengths.numel():
        return {}
    return {**spread(prefix, lengths), f"{prefix}/clip_ratio": float((lengths >= limit).double().mean())}
