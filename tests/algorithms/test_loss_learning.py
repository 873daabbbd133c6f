"""Every loss solves a bandit: a one-token policy over four arms ends up at the best one."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms.aggregation import token_weights, weighted_sum
from strop.algorithms.losses import POLICY_LOSS_REGISTRY, policy_loss_terms, prepare_columns
from strop.algorithms.specs import policy_loss_declaration

REWARDS = torch.tensor([0.0, 0.3, 1.0, 0.6])
BEST = 2
SETTINGS = {"clip_low": 0.2, "clip_high": 0.2, "clip_c": 3.0}
SAMPLES, STEPS, UPDATES = 48, 50, 2


def probability_of_the_best_arm(name: str) -> float:
    """After STEPS batches of sampled arms with group-relative advantages and UPDATES optimizer steps on each."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    mask = torch.ones(SAMPLES, 1, dtype=torch.bool)
    mode = policy_loss_declaration(name).aggregation or "token-mean"
    weights = token_weights(mode, mask, num_tokens=SAMPLES, num_samples=SAMPLES)
    for _ in range(STEPS):
        policy = logits.detach().softmax(0)
        arms = torch.multinomial(policy, SAMPLES, replacement=True, generator=generator)
        rewards = REWARDS[arms]
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6))[:, None]
        old = policy.log()[arms][:, None]
        for _ in range(UPDATES):
            columns = {
                "log_probs": logits.log_softmax(0)[arms][:, None],
                "old_log_probs": old,
                "advantages": advantages,
            }
            prepared = prepare_columns(name, mask=mask, columns=columns, settings=SETTINGS)
            got = policy_loss_terms(name, mask=mask, columns={**columns, **prepared}, settings=SETTINGS)
            optimizer.zero_grad()
            weighted_sum(got.terms, weights).backward()
            optimizer.step()
    return float(logits.detach().softmax(0)[BEST])


# An alias names the same function, so each function learns once.
@pytest.mark.parametrize(
    "name", sorted({f: name for name, f in reversed(POLICY_LOSS_REGISTRY.items())}.values())
)
def test_the_best_arm_of_a_bandit_is_learned(name: str) -> None:
    assert probability_of_the_best_arm(name) > 0.9
