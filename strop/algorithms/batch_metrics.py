"""Metrics of the rows of a step: rewards, advantages, groups, and rollout against trainer.

Every function is pure and returns `{name: number}` under the names that people already chart; a statistic
over nothing is left out, never 0 or NaN. Each says over what it averages: tokens, samples or groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from strop.utils.metrics import Metric

Numbers: TypeAlias = Tensor | Sequence[float] | Sequence[int] | Sequence[bool]
Metrics: TypeAlias = dict[str, float]

SCORE = Metric(
    "critic/score/{mean,max,min}",
    "reward",
    "what the scorer gave, over the samples of a step, also those that `algorithm.keep` and resampling leave out",
)
REWARDS = Metric("critic/rewards/{mean,max,min}", "reward", "the same after penalties")
ADVANTAGES = Metric("critic/advantages/{mean,max,min}", "1", "over trained tokens")
RETURNS = Metric("critic/returns/{mean,max,min}", "reward", "over trained tokens")
VALUES = Metric(
    "critic/values/{mean,max,min}", "reward", "of the critic, when there is one, over trained tokens"
)
EXPLAINED_VARIANCE = Metric(
    "critic/vf_explained_var",
    "share",
    "of the variance of returns that the values explain, over trained tokens",
)
REWARD_KL = Metric(
    "actor/reward_kl_penalty",
    "nats",
    "KL in the reward, when there is one, mean over samples of their token means",
)
PROCESS = Metric(
    "prm/{pair_acc,advantage_share}",
    "share",
    "with algorithm=prime: of pairs of a prompt's samples with different outcomes, those whose better one has the "
    "larger sum of process rewards, where 0.5 is chance; of the squared advantages, what process rewards make",
)
VARIANCE_PROXY = Metric(
    "variance_proxy/{proxy2_total_power,expected_a_squared,expected_w}",
    "",
    "with algorithm=otb, mean over samples: of A² W, of A² and of W, A being a sample's mean advantage over its tokens "
    "and W the squared norm of its gradient with respect to the logits. Where there are importance weights, the first "
    "has a factor, the square of their mean over the sample, and the third has them in its gradient",
)
GROUPS = Metric(
    "rollout/groups_{all_max,all_min,mixed,all_equal,single}",
    "share",
    "of groups that all solve, none solves, can teach, have one other reward, and are of one sample; they add up to 1",
)
PROBS_DIFF = Metric(
    "training/rollout_probs_diff_{valid,max,mean,std}",
    "1",
    "difference of rollout and trainer in a token's probability; `valid` is 1 where there were tokens to compare",
)
LOG_PROBS_DIFF_MAX = Metric(
    "training/rollout_log_probs_diff_max", "nats", "largest difference of a token's log-prob"
)
PROBS_CORRELATION = Metric(
    "training/rollout_actor_probs_pearson_corr", "1", "correlation of both probabilities, over tokens"
)


def critic_metrics(
    *,
    scores: Numbers,
    rewards: Numbers,
    advantages: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    values: Tensor | None = None,
) -> Metrics:
    """Scores, rewards, advantages and returns, and values where there is a critic.

    Args:
        scores: [B], raw scorer output of each sample.
        rewards: [B], after shaping and penalties.
        advantages, returns, response_mask, values: one shape, padded or flat; means are over the true tokens.
    """
    valid = response_mask.bool()
    return {
        **mean_max_min(SCORE, scores),
        **mean_max_min(REWARDS, rewards),
        **mean_max_min(ADVANTAGES, advantages[valid]),
        **mean_max_min(RETURNS, returns[valid]),
        **({} if values is None else mean_max_min(VALUES, values[valid])),
    }


def group_metrics(rewards: Tensor, group_ids: Tensor) -> Metrics:
    """GROUPS: what share of the groups can teach.

    A group of several samples is mixed if its rewards differ; otherwise its one reward is at least 1
    (solved by all), at most 0 (by none), or between (all equal). A group of one is single. The five
    shares of groups add up to 1.

    Args:
        rewards: [B], one per sample.
        group_ids: [B] int64.
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
        "all_max": is_uniform & (largest >= 1),
        "all_min": is_uniform & (largest <= 0),
        "mixed": is_mixed,
        "all_equal": is_uniform & (largest > 0) & (largest < 1),
        "single": is_single,
    }
    return {GROUPS.of(kind): float(chosen.double().mean()) for kind, chosen in kinds.items()}


def mismatch_metrics(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Metrics:
    """Mismatch of the trainer's probabilities and those recorded while sampling, over tokens.

    PROBS_CORRELATION is left out where a side is constant.

    Args:
        log_probs, rollout_log_probs: trainer and rollout, one shape.
        mask: same shape, true on sampled tokens.
    """
    valid = mask.bool()
    train, rollout = log_probs.detach()[valid].double(), rollout_log_probs.detach()[valid].double()
    if not train.numel():
        return {PROBS_DIFF.of("valid"): 0.0}
    difference = (train.exp() - rollout.exp()).abs()
    metrics: Metrics = {
        PROBS_DIFF.of("valid"): 1.0,
        PROBS_DIFF.of("max"): float(difference.max()),
        PROBS_DIFF.of("mean"): float(difference.mean()),
        LOG_PROBS_DIFF_MAX: float((train - rollout).abs().max()),
    }
    if train.numel() > 1:
        metrics[PROBS_DIFF.of("std")] = float(difference.std())
    correlation = _pearson(train.exp(), rollout.exp())
    if correlation is not None:
        metrics[PROBS_CORRELATION] = correlation
    return metrics


def mean_max_min(family: Metric, values: Numbers, *words: str) -> Metrics:
    """Mean, max and min, the last place of a family with `words` in those before it; nothing without values."""
    numbers = doubles(values)
    if not numbers.numel():
        return {}
    return {
        family.of(*words, "mean"): float(numbers.mean()),
        family.of(*words, "max"): float(numbers.max()),
        family.of(*words, "min"): float(numbers.min()),
    }


def doubles(values: Numbers) -> Tensor:
    """The numbers as a float64 tensor."""
    if isinstance(values, Tensor):
        return values.detach().double()
    return torch.tensor(list(values), dtype=torch.float64)


def _pearson(a: Tensor, b: Tensor) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    scale = a.norm() * b.norm()
    return float((a * b).sum() / scale) if scale > 0 else None
