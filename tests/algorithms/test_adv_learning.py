"""Each estimator teaches: sampled REINFORCE steps on a softmax policy with a known best arm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strop.algorithms.advantages import estimate_advantages
from strop.cli.check_functions.estimators import TRAITS

ARM_REWARDS = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
BEST = 3
NUM_PROMPTS, NUM_STEPS, STEP_SIZE = 8, 120, 1.0
TOKEN_LEVEL = (
    "gae",
    "reinforce_plus_plus",
    "remax",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)


@pytest.mark.parametrize("name", sorted(name for name, one in TRAITS.items() if not one.ignores_rewards))
def test_the_best_arm_wins(name: str) -> None:
    # One response is one arm, or three arms in a row with the reward of each on its token. The lead of the best
    # vanishes as soon as two samples take the best arm, so pass@k learns from pairs.
    width = 3 if name in TOKEN_LEVEL else 1
    per_prompt = 2 if name == "grpo_passk" else 4
    logits = torch.zeros(width, len(ARM_REWARDS), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        logits = logits + STEP_SIZE * policy_gradient(name, logits, per_prompt, generator)
    assert logits.softmax(dim=-1)[:, BEST].min().item() > 0.9


def policy_gradient(name: str, logits: Tensor, per_prompt: int, generator: torch.Generator) -> Tensor:
    """Mean over samples of A_t * d log pi(arm_t) / d logits: [R, arms]."""
    probs = logits.softmax(dim=-1)  # [R, arms]
    width, num_rows = len(logits), NUM_PROMPTS * per_prompt
    arms = torch.multinomial(probs, num_rows, replacement=True, generator=generator).T  # [B, R]
    rewards = ARM_REWARDS[arms]  # [B, R]
    per_token = probs @ ARM_REWARDS  # [R], expected reward of each token
    to_go = per_token.flip(0).cumsum(0).flip(0)  # [R]
    advantages, _ = estimate_advantages(
        name,
        token_level_rewards=rewards,
        response_mask=torch.ones(num_rows, width, dtype=torch.bool),
        group_ids=torch.arange(num_rows) // per_prompt,
        settings={},
        columns={
            "values": to_go.expand(num_rows, width),
            "reward_baselines": ARM_REWARDS[probs.argmax(dim=-1)].sum().expand(num_rows),
            "reward_parts": torch.stack([rewards.sum(-1), (arms == BEST).double().sum(-1)], dim=-1),
            "old_log_probs": probs.log().expand(num_rows, -1, -1).gather(2, arms[:, :, None])[:, :, 0],
            "sum_pi_squared": probs.square().sum(-1).expand(num_rows, width),
            "process_rewards": rewards - 0.25,
            "turn_rewards": rewards.sum(-1),
            "sample_index": torch.arange(num_rows),
            "turn_index": torch.zeros(num_rows, dtype=torch.int64),
            "anchor_ids": torch.zeros(num_rows, dtype=torch.int64),
        },
    )
    one_hot = torch.nn.functional.one_hot(arms, len(ARM_REWARDS)).double()  # [B, R, arms]
    return (advantages[:, :, None] * (one_hot - probs)).mean(dim=0)
