"""KL in the reward: the penalty on each token, and the coefficient that may follow the KL seen.

The coefficient is state of the run: it lives with the loop, goes into checkpoints as plain numbers, and is
handed to whoever computes rewards as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from strop.algorithms.batch_metrics import REWARD_KL, Metrics
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.kl import kl_penalty
from strop.algorithms.masked_ops import masked_mean
from strop.protocol import DataProto
from strop.protocol.columns import padded
from strop.utils.metrics import Metric

REWARD_KL_COEF = Metric(
    "actor/reward_kl_penalty_coeff", "1", "factor of the KL in the reward, when there is one"
)
MAX_RELATIVE_ERROR = 0.2
"""Bound on the relative distance from the target that one update answers to."""


def penalized(
    rewards: Tensor, tensors: Mapping[str, Tensor], algorithm: AlgorithmConfig, mask: Tensor, kl_coef: float
) -> Tensor:
    """Rewards per token [B, R] less the penalty that the settings ask for.

    Args:
        rewards: [B, R], in reward units.
        tensors: columns old_log_probs and ref_log_prob [B, R~].
        algorithm: the settings.
        mask: [B, R], true on tokens that are trained on.
        kl_coef: reward per nat.

    Raises:
        ValueError: a column is missing.
    """
    if not algorithm.use_kl_in_reward:
        return rewards
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


class Control:
    """A coefficient that is fixed, or that grows while the KL is above its target and shrinks while it is below.

        coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

    The value of an adaptive one is part of a checkpoint: without it, a resumed run would start again from kl_coef.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        settings = algorithm
        self._is_used = settings.use_kl_in_reward
        self._config = settings.kl_ctrl
        self.value = self._config.kl_coef
        """The coefficient of the next step."""

    @property
    def is_adaptive(self) -> bool:
        """Whether it follows the KL."""
        return self._config.type == "adaptive"

    def follow(self, metrics: Mapping[str, float], num_samples: int) -> Metrics:
        """Move towards the target by the numbers of a step of `num_samples` samples; what the coefficient was in it."""
        if not self._is_used:
            return {}
        used: Metrics = {REWARD_KL_COEF: self.value}
        self.update(metrics[REWARD_KL], num_samples)
        return used

    def update(self, current_kl: float, num_samples: int) -> None:
        """Take note of the KL of a step of `num_samples` samples.

        Raises:
            ValueError: it is adaptive, and the KL is not finite, or the step is so large beside the horizon that the
                coefficient could become 0 or negative.
        """
        if not self.is_adaptive:
            return
        horizon = self._config.horizon
        if not math.isfinite(current_kl):
            raise ValueError(
                f"the KL of the policy to the reference is {current_kl}, which no coefficient can follow; "
                f"look at the log-probs of both"
            )
        if MAX_RELATIVE_ERROR * num_samples >= horizon:
            raise ValueError(
                f"algorithm.kl_ctrl.horizon is {horizon} samples, but one step has {num_samples}, so "
                f"one update could turn the coefficient negative: set it above "
                f"{math.ceil(MAX_RELATIVE_ERROR * num_samples)}, usually to many steps' samples"
            )
        error = min(max(current_kl / self._config.target_kl - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.value *= 1 + error * num_samples / horizon

    def state(self) -> dict[str, float]:
        """Plain numbers for a checkpoint; none of a fixed one, of which the configuration says it all."""
        return {"kl_coef": self.value} if self.is_adaptive else {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from `state()`.

        Raises:
            ValueError: it is adaptive, and the state is that of a fixed coefficient.
        """
        if not self.is_adaptive:
            return
        if "kl_coef" not in state:
            raise ValueError(
                f"the checkpoint holds no coefficient of the KL penalty (found: {sorted(state) or 'nothing'}); "
                f"it is of a run with algorithm.kl_ctrl.type=fixed, so resume it with that"
            )
        self.value = float(state["kl_coef"])
