"""KL in the reward: the penalty on each token, and the coefficient that may follow the KL seen.

The coefficient is state of the run: it lives with the loop, goes into checkpoints as plain numbers, and is
handed to whoever computes rewards as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from strop.algorithms.config import KlControlConfig
from strop.algorithms.kl import kl_penalty
from strop.algorithms.masked import masked_mean

MAX_RELATIVE_ERROR = 0.2
"""Bound on the relative distance from the target that one update answers to."""


def penalized_rewards(
    token_level_scores: Tensor, kl: Tensor, response_mask: Tensor, *, coef: float
) -> Tensor:
    """Rewards per token: token_level_scores - coef * kl on sampled tokens, the score alone elsewhere.

    Args:
        token_level_scores: [B, R], in reward units; scores on given tokens stay.
        kl: [B, R], estimate of the KL at each token, in nats; any value outside the mask.
        response_mask: [B, R], true on tokens the policy sampled.
        coef: reward per nat.

    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    return token_level_scores - coef * torch.where(response_mask.bool(), kl, torch.zeros_like(kl))


def token_level_rewards(
    token_level_scores: Tensor,
    response_mask: Tensor,
    row_lengths: Tensor,
    *,
    answer_scores: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """Rewards per token [B, R]: the scores, with a reward model's on the last token, less the KL penalty.

        token_level_scores + answer_scores on the last response token - kl_coef * KL

    Args:
        token_level_scores: [B, R], in reward units.
        response_mask: [B, R], true on tokens that are trained on.
        row_lengths: [B] int64, tokens of each response.
        answer_scores: [B], a reward model's word on the whole answer; None without one.
        kl: [B, R], see `penalized_rewards`; None without a penalty.
        kl_coef: reward per nat.
    """
    rewards = token_level_scores
    if answer_scores is not None:
        is_last = torch.arange(rewards.shape[1])[None] == row_lengths[:, None] - 1  # [B, R]
        rewards = rewards + torch.where(is_last, answer_scores.to(rewards.dtype)[:, None], 0.0)
    if kl is not None:
        rewards = penalized_rewards(rewards, kl, response_mask, coef=kl_coef)
    return rewards


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


class KlController(Protocol):
    """A coefficient that may change from step to step."""

    @property
    def value(self) -> float:
        """The coefficient of the next step."""

    def update(self, current_kl: float, num_samples: int) -> None:
        """Take note of the KL of a step of `num_samples` samples."""

    def state(self) -> dict[str, float]:
        """Plain numbers for a checkpoint."""

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from `state()`."""


class FixedKlController:
    """Always the same coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self._kl_coef = kl_coef

    @property
    def value(self) -> float:
        """The coefficient."""
        return self._kl_coef

    def update(self, current_kl: float, num_samples: int) -> None:
        """Nothing changes."""

    def state(self) -> dict[str, float]:
        """Nothing to remember: the configuration says it all."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Nothing to restore."""


class AdaptiveKlController:
    """A coefficient that grows while the KL is above its target, and shrinks while it is below.

        coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

    Its value is part of a checkpoint: without it, a resumed run would start again from kl_coef.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    def __init__(self, kl_coef: float, *, target_kl: float, horizon: int) -> None:
        self._value = kl_coef
        self._target_kl = target_kl
        self._horizon = horizon

    @property
    def value(self) -> float:
        """The coefficient of the next step."""
        return self._value

    def update(self, current_kl: float, num_samples: int) -> None:
        """Take note of the KL of a step of `num_samples` samples.

        Raises:
            ValueError: the KL is not finite, or the step is so large beside the horizon that the coefficient
                could become 0 or negative.
        """
        if not math.isfinite(current_kl):
            raise ValueError(
                f"the KL of the policy to the reference is {current_kl}, which no coefficient can follow; "
                f"look at the log-probs of both"
            )
        if MAX_RELATIVE_ERROR * num_samples >= self._horizon:
            raise ValueError(
                f"algorithm.kl_ctrl.horizon is {self._horizon} samples, but one step has {num_samples}, so "
                f"one update could turn the coefficient negative: set it above "
                f"{math.ceil(MAX_RELATIVE_ERROR * num_samples)}, usually to many steps' samples"
            )
        error = min(max(current_kl / self._target_kl - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self._value *= 1 + error * num_samples / self._horizon

    def state(self) -> dict[str, float]:
        """The coefficient."""
        return {"kl_coef": self._value}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue with the coefficient of a checkpoint.

        Raises:
            ValueError: the state holds none; it is that of a fixed coefficient.
        """
        if "kl_coef" not in state:
            raise ValueError(
                f"the checkpoint holds no coefficient of the KL penalty (found: {sorted(state) or 'nothing'}); "
                f"it is of a run with algorithm.kl_ctrl.type=fixed, so resume it with that"
            )
        self._value = float(state["kl_coef"])


def make_kl_controller(config: KlControlConfig) -> KlController:
    """The controller of a configuration, at its start."""
    if config.type == "fixed":
        return FixedKlController(config.kl_coef)
    return AdaptiveKlController(config.kl_coef, target_kl=config.target_kl, horizon=config.horizon)
