"""Generalized advantage estimation: by hand, against a slow rewrite, and its properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import critics as reference
from references.advantages import reward_to_go as reference_reward_to_go
from references.advantages import whiten
from strop.algorithms.advantages import estimate_advantages
from strop.algorithms.advantages.gae import gae_advantages
from strop.algorithms.specs import check_estimator

EXACT = {"rtol": 0.0, "atol": 1e-10}
Rows = list[list[float]]


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def estimate(rewards: Rows, values: Rows, mask: list[list[int]], **numbers: float) -> tuple[Tensor, Tensor]:
    return estimate_advantages(
        "gae",
        token_level_rewards=double(rewards),
        response_mask=torch.tensor(mask),
        group_ids=torch.zeros(len(mask), dtype=torch.int64),
        settings={"gamma": 1.0, "lam": 1.0, **numbers},
        columns={"values": double(values)},
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[Rows, Rows, list[list[int]]]:
    """Rewards, values and masks; every row has a sampled token, and the batch at least two."""
    num_rows, width = draw(st.integers(2, 5)), draw(st.integers(1, 5))
    number = st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0, 3.25])
    rows = [[[draw(number) for _ in range(width)] for _ in range(num_rows)] for _ in range(2)]
    mask = [[draw(st.integers(0, 1)) for _ in range(width)] for _ in range(num_rows)]
    for row in mask:
        row[draw(st.integers(0, width - 1))] = 1
    return rows[0], rows[1], mask


NUMBERS = st.sampled_from([(1.0, 1.0), (1.0, 0.95), (0.9, 1.0), (0.5, 0.5), (0.9, 0.0), (0.0, 0.7)])


def test_three_tokens_by_hand() -> None:
    # gamma = lambda = 1/2. delta_2 = 2 - 0.4 = 1.6; delta_1 = 0 + 0.4/2 - 0.2 = 0; delta_0 = 1 + 0.1 - 0.6 = 0.5.
    # A_2 = 1.6; A_1 = 0 + 1.6/4 = 0.4; A_0 = 0.5 + 0.4/4 = 0.6.
    got = gae_advantages(
        double([[1.0, 0.0, 2.0]]), double([[0.6, 0.2, 0.4]]), torch.ones(1, 3), gamma=0.5, lam=0.5
    )
    torch.testing.assert_close(got, double([[0.6, 0.4, 1.6]]), **EXACT)


def test_given_tokens_carry_value_and_advantage_through() -> None:
    # As above with two given tokens between the first and the second sampled one, whatever their values are.
    got = gae_advantages(
        double([[1.0, 0.0, 0.0, 0.0, 2.0]]),
        double([[0.6, 9.0, math.nan, 0.2, 0.4]]),
        torch.tensor([[1, 0, 0, 1, 1]]),
        gamma=0.5,
        lam=0.5,
    )
    torch.testing.assert_close(got, double([[0.6, 0.0, 0.0, 0.4, 1.6]]), **EXACT)


def test_the_reward_of_a_given_token_goes_to_the_last_sampled_token_before_it() -> None:
    # A tool's reply (tokens 2 and 3) is rewarded; so is a token before every sampled one, which nobody chose.
    mask, values = torch.tensor([[0, 1, 0, 0, 1, 0]]), double([[0.0, 0.3, 0.0, 0.0, 0.7, 0.0]])
    on_given = double([[5.0, 1.0, 2.0, 4.0, 0.0, 8.0]])
    on_sampled = double([[0.0, 7.0, 0.0, 0.0, 8.0, 0.0]])
    got = gae_advantages(on_given, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(got, gae_advantages(on_sampled, values, mask, gamma=0.9, lam=0.8), **EXACT)


@given(batch=batches(), numbers=NUMBERS)
@settings(max_examples=80, deadline=None)
def test_gae_equals_the_sum_over_later_errors(
    batch: tuple[Rows, Rows, list[list[int]]], numbers: tuple[float, float]
) -> None:
    rewards, values, mask = batch
    gamma, lam = numbers
    expected = reference.gae(rewards, values, mask, gamma, lam)
    got = gae_advantages(double(rewards), double(values), torch.tensor(mask), gamma=gamma, lam=lam)
    torch.testing.assert_close(got, double(expected), **EXACT)
    advantages, returns = estimate(rewards, values, mask, gamma=gamma, lam=lam)
    plain = [
        [(a + v) * m for a, v, m in zip(*row, strict=True)]
        for row in zip(expected, values, mask, strict=True)
    ]
    torch.testing.assert_close(returns, double(plain), **EXACT)
    flat = [
        a
        for row, row_mask in zip(expected, mask, strict=True)
        for a, m in zip(row, row_mask, strict=True)
        if m
    ]
    if max(flat) - min(flat) > 1e-6:  # advantages that should be equal differ by rounding
        torch.testing.assert_close(advantages, double(whiten(expected, mask)), rtol=0, atol=1e-8)


@given(batch=batches(), gamma=st.sampled_from([1.0, 0.9]))
@settings(max_examples=40, deadline=None)
def test_with_lambda_one_returns_are_rewards_to_go(
    batch: tuple[Rows, Rows, list[list[int]]], gamma: float
) -> None:
    # The values cancel: sum_j gamma^j (r_j + gamma V_{j+1} - V_j) = G - V.
    rewards, values, mask = batch
    expected = double(reference_reward_to_go(rewards, mask, gamma))
    torch.testing.assert_close(estimate(rewards, values, mask, gamma=gamma)[1], expected, **EXACT)


@given(batch=batches(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_rows_do_not_see_each_other_and_their_order_does_not_matter(
    batch: tuple[Rows, Rows, list[list[int]]], data: st.DataObject
) -> None:
    rewards, values, mask = double(batch[0]), double(batch[1]), torch.tensor(batch[2])
    order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
    whole = gae_advantages(rewards, values, mask, gamma=0.9, lam=0.8)
    permuted = gae_advantages(rewards[order], values[order], mask[order], gamma=0.9, lam=0.8)
    torch.testing.assert_close(permuted, whole[order], rtol=0, atol=0)
    one = gae_advantages(rewards[:1], values[:1], mask[:1], gamma=0.9, lam=0.8)
    torch.testing.assert_close(one, whole[:1], rtol=0, atol=0)


def test_advantages_are_whitened_and_exactly_zero_outside_the_mask() -> None:
    mask = [[1, 0, 1], [0, 1, 0]]
    advantages, returns = estimate(
        [[1.0, 0.0, 2.0], [0.0, 3.0, 4.0]], [[0.1, 7.0, 0.2], [8.0, 0.3, 9.0]], mask
    )
    valid = torch.tensor(mask).bool()
    assert (advantages[~valid] == 0).all()
    assert (returns[~valid] == 0).all()
    assert advantages[valid].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert advantages[valid].var().item() == pytest.approx(1.0, abs=1e-6)
    # 1 + 2 - 0.1 + 0.1, 2, and 3 + 4: the returns are not whitened.
    torch.testing.assert_close(returns[valid], double([3.0, 2.0, 7.0]), **EXACT)


def test_padding_changes_nothing() -> None:
    rewards, values, mask = [[1.0, 2.0], [0.5, 0.0]], [[0.1, 0.2], [0.3, 0.4]], [[1, 1], [1, 1]]
    wide = [[[*row, 0.0, 0.0] for row in part] for part in (rewards, values)]
    narrow = estimate(rewards, values, mask, lam=0.9)
    padded = estimate(wide[0], wide[1], [[*row, 0, 0] for row in mask], lam=0.9)
    for plain, longer in zip(narrow, padded, strict=True):
        torch.testing.assert_close(longer[:, :2], plain, rtol=1e-12, atol=1e-12)


def test_a_single_sampled_token_has_no_advantage_and_its_return() -> None:
    advantages, returns = estimate([[0.0, 1.0]], [[0.0, 0.0]], [[0, 1]])
    assert advantages.tolist() == [[0.0, 0.0]]
    assert returns.tolist() == [[0.0, 1.0]]


def test_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards must be finite, but those of rows \[0\] are not"):
        estimate([[math.nan, 0.0]], [[0.0, 0.0]], [[1, 1]])
    with pytest.raises(ValueError, match="the critic gave a value that is NaN or infinite for a sampled"):
        estimate([[0.0, 0.0]], [[0.0, math.inf]], [[1, 1]])


def test_gae_needs_values_and_no_groups() -> None:
    with pytest.raises(ValueError, match="'gae' needs the columns values, but the batch has group_ids"):
        estimate_advantages(
            "gae",
            token_level_rewards=double([[1.0]]),
            response_mask=torch.ones(1, 1),
            group_ids=torch.tensor([0]),
            settings={},
        )
    check_estimator("gae", samples_per_prompt=1, gamma=0.9, lam=0.95)
    with pytest.raises(
        ValueError, match=r"algorithm\.lam is set, but .*=grpo has no such setting: remove it, or use gae"
    ):
        check_estimator("grpo", samples_per_prompt=4, lam=0.95)
    with pytest.raises(
        ValueError, match=r"algorithm\.gamma is set.*or use gae or gigpo or prime or reinforce_plus_plus"
    ):
        check_estimator("rloo", samples_per_prompt=4, gamma=0.9)
