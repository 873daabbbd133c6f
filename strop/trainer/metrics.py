"""The numbers of a step under the names that people already chart, from plain tensors.

Every function is pure and returns `{name: number}`; a statistic over nothing is left out, never 0 or NaN.
Each name says in its function over what it averages: tokens, samples, groups or prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from strop.algorithms.aggregation import row_numbers

Numbers: TypeAlias = Tensor | Sequence[float] | Sequence[int] | Sequence[bool]
Metrics: TypeAlias = dict[str, float]

LOG_RATIO_BOUND = 20.0
"""Largest |log-ratio| that is exponentiated."""
PHASES_OVER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")
"""Phases whose time is also given per token of prompt and response; `gen` is per response token."""


def critic_metrics(
    *, scores: Numbers, rewards: Numbers, advantages: Tensor, returns: Tensor, response_mask: Tensor
) -> Metrics:
    """critic/{score,rewards,advantages,returns}/{mean,max,min}.

    Args:
        scores: [B], raw scorer output of each sample.
        rewards: [B], after shaping and penalties.
        advantages, returns, response_mask: one shape, padded or flat; means are over the true tokens.
    """
    valid = response_mask.bool()
    return {
        **_spread("critic/score", scores),
        **_spread("critic/rewards", rewards),
        **_spread("critic/advantages", advantages[valid]),
        **_spread("critic/returns", returns[valid]),
    }


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
    responses, aborted = _double(response_lengths), _double(is_aborted).bool()
    metrics = {
        **_lengths("prompt_length", _double(prompt_lengths), max_prompt_tokens),
        **_lengths("response_length", responses, max_response_tokens),
        **_lengths("response_length_non_aborted", responses[~aborted], max_response_tokens),
    }
    if aborted.numel():
        metrics["response/aborted_ratio"] = float(aborted.double().mean())
    return metrics


def turn_metrics(num_turns: Numbers) -> Metrics:
    """num_turns/{min,max,mean} over samples."""
    return _spread("num_turns", num_turns)


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


def group_metrics(
    rewards: Tensor, group_ids: Tensor, *, lowest: float = 0.0, highest: float = 1.0
) -> Metrics:
    """rollout/groups_{all_max,all_min,mixed,all_equal,single}: what share of the groups can teach.

    A group of several samples is mixed if its rewards differ; otherwise its one reward is at least `highest`
    (solved by all), at most `lowest` (by none), or between (all equal). A group of one is single. The five
    shares of groups add up to 1.

    Args:
        rewards: [B], one per sample.
        group_ids: [B] int64.
        lowest, highest: the rewards that count as failed and as solved.
    """
    if not rewards.numel():
        return {}
    _, group, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
    values = rewards.double()
    empty = torch.zeros(count.shape, dtype=torch.float64)
    largest = empty.scatter_reduce(0, group, values, "amax", include_self=False)  # [G]
    smallest = empty.scatter_reduce(0, group, values, "amin", include_self=False)  # [G]
    is_single = count == 1
    is_mixed = ~is_single & (largest > smallest)
    is_uniform = ~is_single & ~is_mixed
    kinds = {
        "all_max": is_uniform & (largest >= highest),
        "all_min": is_uniform & (largest <= lowest) & (largest < highest),
        "mixed": is_mixed,
        "all_equal": is_uniform & (largest > lowest) & (largest < highest),
        "single": is_single,
    }
    return {f"rollout/groups_{kind}": float(chosen.double().mean()) for kind, chosen in kinds.items()}


def reward_outcome_metrics(kinds: Sequence[Literal["score", "error", "timeout"]]) -> Metrics:
    """reward/{ok,error,timeout}: how many samples were scored, and how many were not and why."""
    counts = Counter(kinds)
    return {
        "reward/ok": float(counts["score"]),
        "reward/error": float(counts["error"]),
        "reward/timeout": float(counts["timeout"]),
    }


def mismatch_metrics(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, row_lengths: Tensor | None = None
) -> Metrics:
    """How far the trainer's probabilities are from those recorded while sampling.

    training/rollout_probs_diff_{valid,max,mean,std} and training/rollout_actor_probs_pearson_corr compare
    probabilities over tokens; training/rollout_log_probs_diff_max is the largest |difference| of logs.
    The rollout_corr/ keys are those of `off_policy_metrics`. The correlation is left out where a side is
    constant.

    Args:
        log_probs, rollout_log_probs: trainer and rollout, one shape: [B, R] padded, or [N] flat.
        mask: same shape, true on sampled tokens.
        row_lengths: [B] int64, tokens of each row, for the flat layout.
    """
    valid = mask.bool()
    train, rollout = log_probs.detach()[valid].double(), rollout_log_probs.detach()[valid].double()
    if not train.numel():
        return {"training/rollout_probs_diff_valid": 0.0}
    difference = (train.exp() - rollout.exp()).abs()
    metrics = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_log_probs_diff_max": float((train - rollout).abs().max()),
    }
    if train.numel() > 1:
        metrics["training/rollout_probs_diff_std"] = float(difference.std())
    correlation = _pearson(train.exp(), rollout.exp())
    if correlation is not None:
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    if row_lengths is None:
        rows = torch.arange(mask.shape[0], device=mask.device)[:, None].expand(mask.shape)[valid]
    else:
        rows = row_numbers(row_lengths)[valid]
    return {**metrics, **off_policy_metrics(train, rollout, rows)}


def off_policy_metrics(train: Tensor, rollout: Tensor, rows: Tensor) -> Metrics:
    """rollout_corr/{kl,k3_kl,chi2_token} over tokens, and perplexities and chi2_seq over samples.

    With rho = train - rollout per token: kl = mean(-rho), k3_kl = mean(e^rho - 1 - rho), chi2_token =
    mean(e^2rho) - 1, chi2_seq = mean over samples of e^(2 sum rho), - 1. Exponents are clamped to +-20 before
    doubling, all else is measured before any clamp. A sample's log-perplexity is minus its mean log-prob;
    log_ppl_diff is the trainer's minus the rollout's.

    Args:
        train, rollout, rows: [M], valid tokens only; `rows` numbers the sample of each.
    """
    rho = train - rollout
    _, sample, count = torch.unique(rows, return_inverse=True, return_counts=True)
    zeros = torch.zeros(count.shape, dtype=torch.float64, device=train.device)
    train_log_ppl = -zeros.index_add(0, sample, train) / count  # [B]
    rollout_log_ppl = -zeros.index_add(0, sample, rollout) / count  # [B]
    difference = train_log_ppl - rollout_log_ppl  # [B]
    sample_rho = zeros.index_add(0, sample, rho)  # [B]
    bounded = rho.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    values = {
        "kl": (-rho).mean(),
        "k3_kl": (torch.expm1(bounded) - bounded).mean(),
        "chi2_token": torch.expm1(2 * bounded).mean(),
        "chi2_seq": torch.expm1(2 * sample_rho.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).mean(),
        "training_log_ppl": train_log_ppl.mean(),
        "training_ppl": train_log_ppl.exp().mean(),
        "rollout_log_ppl": rollout_log_ppl.mean(),
        "rollout_ppl": rollout_log_ppl.exp().mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
    }
    return {f"rollout_corr/{name}": float(value) for name, value in values.items()}


def _spread(prefix: str, values: Numbers) -> Metrics:
    numbers = _double(values)
    if not numbers.numel():
        return {}
    return {
        f"{prefix}/mean": float(numbers.mean()),
        f"{prefix}/max": float(numbers.max()),
        f"{prefix}/min": float(numbers.min()),
    }


def _lengths(prefix: str, lengths: Tensor, limit: int) -> Metrics:
    if not lengths.numel():
        return {}
    return {**_spread(prefix, lengths), f"{prefix}/clip_ratio": float((lengths >= limit).double().mean())}


def _pearson(a: Tensor, b: Tensor) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    scale = a.norm() * b.norm()
    return float((a * b).sum() / scale) if scale > 0 else None


def _double(values: Numbers) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().double()
    return torch.tensor(list(values), dtype=torch.float64)
