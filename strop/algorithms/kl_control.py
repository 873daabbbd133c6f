"""KL in the reward: the penalty on each token, and the coefficient that may follow the KL seen.

The coefficient is state of the run: it lives with the loop, goes into checkpoints as plain numbers, and is
handed to whoever computes rewards as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from strop.algorithms.config import KlControlConfig
from strop.algorithms.kl import kl_penalty
from strop.algorithms.masked import masked_mean

MAX_RELATIVE_ERROR = 0.2
"""Bound on the relative distance from the target that one update answers to."""


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
        kl: [B, R], estimate of the KL at each token, in nats; any value outside the mask; None without a penalty.
        kl_coef: reward per nat.

    Source: of the penalty: Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    rewards = token_level_scores
    if answer_scores is not None:
        is_last = torch.arange(rewards.shape[1])[None] == row_lengths[:, None] - 1  # [B, R]
        rewards = rewards + torch.where(is_last, answer_scores.to(rewards.dtype)[:, None], 0.0)
    if kl is not None:
        rewards = rewards - kl_coef * torch.where(response_mask.bool(), kl, torch.zeros_like(kl))
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


class KlController:
    """A coefficient that is fixed, or that grows while the KL is above its target and shrinks while it is below.

        coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

    The value of an adaptive one is part of a checkpoint: without it, a resumed run would start again from kl_coef.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    def __init__(self, config: KlControlConfig) -> None:
        self._config = config
        self.value = config.kl_coef
        """The coefficient of the next step."""

    @property
    def is_adaptive(self) -> bool:
        """Whether it follows the KL."""
        return self._config.type == "adaptive"

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
