"""Process rewards and the loss on outcomes, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from strop.algorithms.implicit_reward import outcome_terms, pair_accuracy, process_rewards

EXACT = {"rtol": 0.0, "atol": 1e-12}


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_reward_of_a_token_is_beta_per_nat() -> None:
    got = process_rewards(double([-1.0, -2.0]), double([-3.0, -1.0]), beta=0.5)
    assert got.tolist() == [1.0, -0.5]


def test_a_sequence_is_right_with_the_sigmoid_of_its_sum() -> None:
    # Sums: ln 3, of which the sigmoid is 3/4; 0 of a sequence in two parts; 0 of one without a sampled token.
    rewards = double([math.log(3.0), 0.7, math.nan, -0.7, 5.0])
    mask = torch.tensor([True, True, False, True, False])
    sequences = torch.tensor([0, 1, 0, 1, 2])
    terms, scores = outcome_terms(rewards, mask, sequences, double([1.0, 0.0, 1.0]))
    torch.testing.assert_close(scores, double([math.log(3.0), 0.0, 0.0]), **EXACT)
    torch.testing.assert_close(terms, double([math.log(4 / 3), math.log(2.0), math.log(2.0)]), **EXACT)
    terms, _ = outcome_terms(rewards, mask, sequences, double([0.0, 1.0, 1.0]))
    torch.testing.assert_close(terms, double([math.log(4.0), math.log(2.0), math.log(2.0)]), **EXACT)


@pytest.mark.parametrize(("outcome", "expected"), [(1.0, -0.25), (0.0, 0.75)])
def test_the_gradient_is_that_of_a_logistic_regression(outcome: float, expected: float) -> None:
    rewards = double([math.log(3.0), 0.0]).requires_grad_()
    terms, _ = outcome_terms(rewards, torch.tensor([True, True]), torch.tensor([0, 0]), double([outcome]))
    terms.sum().backward()
    torch.testing.assert_close(rewards.grad, double([expected, expected]), **EXACT)


def test_no_tokens_give_no_terms_that_still_lead_back_to_them() -> None:
    rewards = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    terms, _ = outcome_terms(rewards, nothing.bool(), nothing, torch.zeros(0))
    terms.sum().backward()
    assert rewards.grad is not None


def test_pairs_of_a_prompt_with_different_outcomes_are_ranked() -> None:
    # The first prompt: 1 above 0 twice, once ranked right and once alike. The second: 0.5 above 0, ranked wrong; pairs
    # across prompts and those with equal outcomes count nowhere.
    scores, rewards = double([0.2, -0.3, 0.2, -5.0, 4.0]), double([1.0, 0.0, 0.0, 0.5, 0.0])
    assert pair_accuracy(scores, rewards, torch.tensor([4, 4, 4, 7, 7])) == pytest.approx(1.5 / 3)
    assert math.isnan(pair_accuracy(scores, double([1.0] * 5), torch.tensor([0] * 5)))
