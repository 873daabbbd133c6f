"""Rollout correction: weights and masks for tokens that another policy than the trainer's sampled.

The sampling policy differs from the trainer's by other kernels, by precision, or by age. `correct` turns the
two log-probs of each token into importance weights, which multiply its loss, and into the mask of the tokens
that are trained on. Whatever counts tokens or samples afterwards (denominators, metrics, whitening) must count
that mask, not the response mask it came from: a rejected token is as if it had never been sampled.

Where the rollout's log-probs stand in for the old ones (algorithm.old_log_probs=rollout), the two are equal and
nothing would be corrected: there, call `correct` with the trainer's current log-probs. The ratio of a clipped
loss then holds the correction already, so only its mask is for use, not its weights.

Sources: token-level truncation: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training"; sequence-level masking: Liu et al. 2025, "When speed kills stability"; masking of tokens on both
sides: IcePop, Ling team 2025; k1, k2, k3: Schulman 2020, "Approximating KL divergence".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.kl import LOG_RATIO_BOUND
from strop.algorithms.masked_ops import masked_mean, masked_sum
from strop.algorithms.rollout_correction_config import CorrectionConfig, RejectRule
from strop.utils.metrics import Metric

Metrics = dict[str, float]

CORRECTION = Metric(
    "rollout_corr/rollout_<is or rs>_{mean,max,min,std,fraction_high,fraction_low,ratio_fraction_high,"
    "ratio_fraction_low,masked_fraction,eff_sample_size,oob_ratio,batch_norm_factor,seq_mean,seq_max,seq_min,seq_std,seq_max_deviation,"
    "seq_fraction_high,seq_fraction_low,seq_masked_fraction}",
    "1; shares",
    "`is`: importance weights; `rs_...`: the statistic that rejects; over tokens, and with `seq_` over samples",
)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weights and mask of a batch [B, R]; detached."""

    weights: Tensor | None
    """[B, R], the dtype of the log-probs: factor of each token's loss, 0 outside `mask`. None: no weights."""
    mask: Tensor
    """[B, R] bool: tokens that are trained on, a part of the response mask; possibly none."""
    metrics: Metrics
    """Under rollout_corr/, over the whole response mask and before any bound acts."""


def correct(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, config: CorrectionConfig
) -> Correction:
    """Importance weights and rejections of a whole batch.

    With rho = old - rollout per token, ratio = exp(rho):

        weights    token: exp(rho_t); sequence: exp(sum_t rho_t); geometric: exp(mean_t rho_t); rho clamped to
                   +-20 before exp. truncate: min(w, upper). mask: w where lower <= w <= upper, else 0.
        normalize  w / mean(w), the mean over tokens of `mask` (token), or over samples with such tokens.
        reject     k1 = -rho, k2 = rho^2 / 2, k3 = e^rho - 1 - rho (rho clamped to +-20), per token or as sum,
                   mean or maximum of a row. k1 stays where lower <= ratio <= upper; k2 and k3 up to their
                   bound. Several statistics must all agree. A row statistic rejects all tokens of a row.

    The bounds of k1 hold for the ratio itself, not for its inverse, which -rho would suggest; for ranges such
    as [0.5, 2] both are the same. The mean of `normalize` leaves out rejected tokens, so that the weights in
    use have mean 1. Equal log-probs give weights of 1 and reject nothing, whatever the configuration.

    Args:
        old_log_probs: [B, R], by the trainer.
        rollout_log_probs: [B, R], recorded while sampling.
        response_mask: [B, R], true on tokens that the policy sampled; what is elsewhere does not matter.
        config: of this batch's run.

    Raises:
        ValueError: different shapes, no sampled token at all, or a sampled token without a finite log-prob.
    """
    valid = _checked_mask(old_log_probs, rollout_log_probs, response_mask)
    rho = torch.where(valid, old_log_probs.detach().double() - rollout_log_probs.detach().double(), 0.0)
    metrics: Metrics = {}
    mask = valid
    for name, rule in config.rules.items():
        keep, statistics = _apply_rule(rho, valid, name, rule)
        mask = mask & keep
        metrics |= statistics
    if config.reject:
        metrics |= _masked_fractions("rs", valid, mask)
    if config.weights == "none":
        return Correction(weights=None, mask=mask, metrics=metrics)
    weights, statistics = _weights(rho, valid, mask, config)
    return Correction(weights=weights.to(old_log_probs.dtype), mask=mask, metrics=metrics | statistics)


def _checked_mask(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """The response mask as bool, once the three fit together."""
    shapes = [tuple(part.shape) for part in (old_log_probs, rollout_log_probs, response_mask)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise ValueError(
            f"rollout correction needs three tensors of one shape [B, R], got old_log_probs {shapes[0]}, "
            f"rollout_log_probs {shapes[1]} and response_mask {shapes[2]}"
        )
    valid = response_mask.bool()
    if not valid.any():
        raise ValueError(
            "rollout correction got a batch without a single sampled token: skip the step, or look for why "
            "every token was masked"
        )
    for name, log_probs in (("old_log_probs", old_log_probs), ("rollout_log_probs", rollout_log_probs)):
        not_finite = ~torch.isfinite(log_probs.detach()) & valid
        if not_finite.any():
            row, column = not_finite.nonzero()[0].tolist()
            raise ValueError(
                f"{name} of sample {row}, token {column} is {float(log_probs[row, column])}: a sampled token has "
                f"a finite log-prob under every model, so look at what computed it"
            )
    return valid


def _weights(rho: Tensor, valid: Tensor, mask: Tensor, config: CorrectionConfig) -> tuple[Tensor, Metrics]:
    """Weights [B, R], float64, and their metrics."""
    log_ratio = rho  # [B, R]
    if config.weights == "sequence":
        log_ratio = masked_sum(rho, valid, axis=1)[:, None].expand(rho.shape)
    elif config.weights == "geometric":
        log_ratio = masked_mean(rho, valid, axis=1)[:, None].expand(rho.shape)
    raw = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    lower = config.lower if config.mode == "mask" else 1 / config.upper
    metrics = _ratio_statistics("is", raw, valid, lower=lower, upper=config.upper, neutral=1.0)
    extremes = log_ratio[valid].exp()
    metrics[CORRECTION.of("is", "max")] = float(extremes.max())
    metrics[CORRECTION.of("is", "min")] = float(extremes.min())
    if config.mode == "truncate":
        weights = raw.clamp(max=config.upper)
    else:
        inside = (raw >= lower) & (raw <= config.upper)
        weights = torch.where(inside, raw, 0.0)
        metrics[CORRECTION.of("is", "oob_ratio")] = _share(~inside[valid])
    metrics[CORRECTION.of("is", "eff_sample_size")] = _effective_share(weights[valid])
    weights = torch.where(mask, weights, 0.0)
    if config.normalize and mask.any():
        factor = _batch_mean(weights, mask, per_token=config.weights == "token")
        metrics[CORRECTION.of("is", "batch_norm_factor")] = float(factor)
        weights = weights / factor if factor > 0 else weights  # 0 where mode=mask left no weight at all
    return weights, metrics


def _batch_mean(weights: Tensor, mask: Tensor, *, per_token: bool) -> Tensor:
    """Mean weight over the tokens of the mask, or over the rows that have such tokens."""
    if per_token:
        return weights[mask].mean()
    return masked_mean(weights, mask, axis=1)[mask.any(dim=1)].mean()


def _effective_share(weights: Tensor) -> float:
    """Effective sample size as a share of the number of weights: 1 / mean((w / mean w)^2), in (0, 1]; 0 where no weight
    is left.

    Source: Kish 1965, Survey Sampling.
    """
    mean = weights.mean()
    return float(1 / (weights / mean).square().mean()) if mean > 0 else 0.0


def _apply_rule(rho: Tensor, valid: Tensor, name: str, rule: RejectRule) -> tuple[Tensor, Metrics]:
    """Mask of the tokens that a rule keeps [B, R], and its metrics."""
    bounded = rho.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    per_token = {"k1": rho, "k2": rho.square() / 2, "k3": torch.expm1(bounded) - bounded}[rule.kind]
    if rule.level == "token":
        values = per_token
    else:
        values = _row_statistic(per_token, valid, rule.level)[:, None].expand(rho.shape)
    lower, upper = rule.lower, rule.upper
    if rule.kind == "k1":  # rho is the log of the ratio that the bounds are for
        lower, upper = math.log(lower), math.log(upper)
    keep = (values >= lower) & (values <= upper)
    option = f"rs_{name}"
    metrics = _ratio_statistics(option, values, valid, lower=lower, upper=upper, neutral=0.0)
    if rule.kind == "k1":
        metrics = _negated_means(metrics, option)
    return keep, metrics | _masked_fractions(option, valid, valid & keep)


def _row_statistic(per_token: Tensor, valid: Tensor, level: str) -> Tensor:
    """[B]: sum, mean or maximum over a row's valid tokens; 0 for a row without any."""
    if level == "seq_sum":
        return masked_sum(per_token, valid, axis=1)
    if level == "seq_mean":
        return masked_mean(per_token, valid, axis=1)
    return torch.where(valid, per_token, 0.0).amax(dim=1)  # k2 and k3 are at least 0


def _negated_means(metrics: Metrics, option: str) -> Metrics:
    """Statistics of rho as those of k1 = -rho; the fractions stay those of the ratio beyond its bounds."""
    negated = dict(metrics)
    for level in ("", "seq_"):
        negated[CORRECTION.of(option, f"{level}mean")] = -metrics[CORRECTION.of(option, f"{level}mean")]
        negated[CORRECTION.of(option, f"{level}max")] = -metrics[CORRECTION.of(option, f"{level}min")]
        negated[CORRECTION.of(option, f"{level}min")] = -metrics[CORRECTION.of(option, f"{level}max")]
    return negated


def _masked_fractions(option: str, valid: Tensor, mask: Tensor) -> Metrics:
    """Share of tokens that were rejected, and of samples that lost at least one."""
    rejected = valid & ~mask
    rows = valid.any(dim=1)
    return {
        CORRECTION.of(option, "masked_fraction"): _share(rejected[valid]),
        CORRECTION.of(option, "seq_masked_fraction"): _share(rejected.any(dim=1)[rows]),
    }


def _ratio_statistics(
    option: str, values: Tensor, valid: Tensor, *, lower: float, upper: float, neutral: float
) -> Metrics:
    """Statistics over tokens, and under seq_ over samples, of which each enters with its mean.

    Args:
        option: first part of the names.
        values, valid: [B, R].
        lower, upper: bounds of the fractions that are beyond them.
        neutral: the value where trainer and rollout agree, for seq_max_deviation.
    """
    tokens = values[valid]
    samples = masked_mean(values, valid, axis=1)[valid.any(dim=1)]
    high, low = (
        ("ratio_fraction_high", "ratio_fraction_low")
        if option == "is"
        else (
            "fraction_high",
            "fraction_low",
        )
    )
    metrics = {
        **_moments("", tokens),
        high: _share(tokens > upper),
        low: _share(tokens < lower),
        **_moments("seq_", samples),
        "seq_max_deviation": float((samples - neutral).abs().max()),
        "seq_fraction_high": _share(samples > upper),
        "seq_fraction_low": _share(samples < lower),
    }
    return {CORRECTION.of(option, name): value for name, value in metrics.items()}


def _moments(prefix: str, values: Tensor) -> Metrics:
    """Mean, max, min and, of two or more values, the standard deviation (divided by n - 1)."""
    moments = {
        f"{prefix}mean": float(values.mean()),
        f"{prefix}max": float(values.max()),
        f"{prefix}min": float(values.min()),
    }
    if values.numel() > 1:
        moments[f"{prefix}std"] = float(values.std())
    return moments


def _share(chosen: Tensor) -> float:
    return float(chosen.double().mean())
