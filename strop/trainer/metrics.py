"""The numbers of a step under the names that people already chart, from plain tensors.

Every function is pure and returns `{name: number}`; a statistic over nothing is left out, never 0 or NaN.
Each name says in its function over what it averages: tokens, samples, groups or prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from strop.algorithms.measures import (
    Metrics,
    Numbers,
    critic_metrics,
    doubles,
    group_metrics,
    mismatch_metrics,
    off_policy_metrics,
    spread,
)

__all__ = [
    "PHASES_OVER_ALL_TOKENS",
    "critic_metrics",
    "group_metrics",
    "length_metrics",
    "mismatch_metrics",
    "off_policy_metrics",
    "reward_outcome_metrics",
    "throughput_metrics",
    "timing_metrics",
    "turn_metrics",
]

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


def reward_outcome_metrics(kinds: Sequence[Literal["score", "error", "timeout"]]) -> Metrics:
    """reward/{ok,error,timeout}: how many samples were scored, and how many were not and why."""
    counts = Counter(kinds)
    return {
        "reward/ok": float(counts["score"]),
        "reward/error": float(counts["error"]),
        "reward/timeout": float(counts["timeout"]),
    }


def _lengths(prefix: str, lengths: Tensor, limit: int) -> Metrics:
    if not lengths.numel():
        return {}
    return {**spread(prefix, lengths), f"{prefix}/clip_ratio": float((lengths >= limit).double().mean())}
