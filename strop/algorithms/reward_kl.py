"""The KL penalty in the reward, taken off each token before advantages are computed (kl_controller.py: its factor)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from strop.algorithms.batch_metrics import REWARD_KL, Metrics
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.kl import kl_penalty
from strop.algorithms.masked_ops import masked_mean
from strop.protocol import DataProto
from strop.protocol.columns import padded


def apply_kl_penalty(
    rewards: Tensor, tensors: Mapping[str, Tensor], algorithm: AlgorithmConfig, mask: Tensor, kl_coef: float
) -> Tensor:
    """Rewards per token [B, R] less kl_coef times the KL of the policy to the reference (algorithm.use_kl_in_reward).

    Args:
        rewards: [B, R], in reward units.
        tensors: columns old_log_probs and ref_log_prob [B, R~].
        algorithm: `kl_penalty` names the estimate of the KL.
        mask: [B, R], true on tokens that are trained on.
        kl_coef: reward per nat.

    Raises:
        ValueError: a column is missing.
    """
    return less_kl(rewards, mask, _kl_of_tokens(tensors, algorithm, mask)[0], kl_coef)


def less_kl(rewards: Tensor, mask: Tensor, kl: Tensor, kl_coef: float) -> Tensor:
    """Rewards [B, R] - kl_coef * KL, on tokens of the mask; `kl` [B, R] in nats may be anything outside of it.

    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    return rewards - kl_coef * torch.where(mask.bool(), kl, torch.zeros_like(kl))


def kl_metrics(rows: DataProto, algorithm: AlgorithmConfig) -> Metrics:
    """REWARD_KL of a step, where it is in the reward."""
    if not algorithm.use_kl_in_reward:
        return {}
    tensors = rows.tensors()
    return {REWARD_KL: float(_kl_of_tokens(tensors, algorithm, padded(tensors, "response_mask").bool())[1])}


def _kl_of_tokens(
    tensors: Mapping[str, Tensor], algorithm: AlgorithmConfig, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """KL per token [B, R], and its mean."""
    missing = [name for name in ("old_log_probs", "ref_log_prob") if name not in tensors]
    if missing:
        raise ValueError(
            f"algorithm.use_kl_in_reward needs the columns {' and '.join(missing)}, but the batch has "
            f"{', '.join(sorted(tensors))}"
        )
    kind = algorithm.kl_penalty
    return reward_kl(padded(tensors, "old_log_probs"), padded(tensors, "ref_log_prob"), mask, kind=kind)


def reward_kl(
    old_log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, *, kind: str
) -> tuple[Tensor, Tensor]:
    """KL per token [B, R] under the policy that sampled, and the one number that a controller steers by.

    The number is the mean over samples of each sample's mean over its sampled tokens; samples without any
    are left out of the mean (verl counts them as a KL of 0). It is 0 for a batch without tokens.
    """
    kl = kl_penalty(old_log_probs, ref_log_probs, kind)
    per_sample = masked_mean(kl, response_mask, axis=-1)  # [B]
    return kl, masked_mean(per_sample, response_mask.bool().any(dim=-1))
