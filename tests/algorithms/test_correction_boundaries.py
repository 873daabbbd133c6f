"""Rollout correction and the statistics of mismatch exactly at their bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.batch_metrics import (
    SCORE,
    critic_metrics,
    doubles,
    group_metrics,
    mean_max_min,
    mismatch_metrics,
)
from strop.algorithms.rollout_correction import Correction, correct
from strop.algorithms.rollout_correction_config import CorrectionConfig
from strop.workers.off_policy_metrics import off_policy_metrics

P = "rollout_corr"


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def corrected(rho: list[list[float]], mask: list[list[int]] | None = None, **setting: Any) -> Correction:
    """With rollout log-probs of 0, so that rho comes through without rounding."""
    old = double(rho)
    valid = torch.ones_like(old) if mask is None else torch.tensor(mask)
    return correct(old, torch.zeros_like(old), valid, CorrectionConfig(**setting))


@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean"])
def test_a_ratio_at_a_bound_stays(level: str) -> None:
    two = math.log(2.0)
    for rho, bounds in ((two, [1.0, 2.0]), (-two, [0.5, 1.0]), (0.0, [1.0, 1.0])):
        rule = {f"{level}_k1": bounds}
        assert corrected([[rho]], reject=rule).mask.all()
        beyond = rho + math.copysign(1e-9, rho)
        assert not corrected([[beyond]], reject=rule).mask.any()


@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean", "seq_max"])
def test_a_divergence_at_its_bound_stays(level: str) -> None:
    # k2 of rho = 1 is 1/2.
    assert corrected([[1.0]], reject={f"{level}_k2": 0.5}).mask.all()
    assert not corrected([[1.0]], reject={f"{level}_k2": 0.5 - 1e-12}).mask.any()


def test_a_weight_at_a_bound_stays() -> None:
    # exp(0) is exactly 1: both bounds.
    got = corrected([[0.0, -1e-9, 1e-9]], weights="token", mode="mask", lower=1.0, upper=1.0)
    assert got.weights is not None
    assert got.weights.tolist() == [[1.0, 0.0, 0.0]]
    assert got.metrics[f"{P}/rollout_is_oob_ratio"] == pytest.approx(2 / 3)


def test_exponents_are_bounded_at_20_on_both_sides() -> None:
    got = corrected([[30.0, -30.0, 20.0, -20.0]], weights="token", upper=1e12)
    assert got.weights is not None
    ends = [math.exp(20), math.exp(-20)]
    torch.testing.assert_close(got.weights, double([ends * 2]), rtol=1e-12, atol=0)
    # k3 of a token beyond is that at the bound: e^20 - 1 - 20, and e^-20 - 1 + 20.
    for rho, value in ((30.0, math.exp(20) - 21), (-30.0, math.exp(-20) + 19)):
        assert corrected([[rho]], reject={"token_k3": value * (1 + 1e-9)}).mask.all()
        assert not corrected([[rho]], reject={"token_k3": value * (1 - 1e-9)}).mask.any()


def test_shares_beyond_bounds_count_what_is_strictly_beyond() -> None:
    got = corrected(
        [[0.0, 0.0], [math.log(4.0), 0.0], [-math.log(4.0), 0.0]], weights="token", upper=4.0
    ).metrics
    # The ratio 4 is at the upper bound, 1/4 at the lower one of mode=truncate, 1 / upper.
    assert got[f"{P}/rollout_is_ratio_fraction_high"] == 0.0
    assert got[f"{P}/rollout_is_ratio_fraction_low"] == 0.0
    got = corrected(
        [[0.0, 0.0], [math.log(4.1), 0.0], [-math.log(4.1), 0.0]], weights="token", upper=4.0
    ).metrics
    assert got[f"{P}/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 6)
    assert got[f"{P}/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 6)


def test_samples_enter_shares_with_their_mean() -> None:
    # Means of the two samples' ratios: 3 and 1/4, with bounds 1/4 and 3.
    rho = [[math.log(2.0), math.log(4.0)], [math.log(0.25), math.log(0.25)]]
    got = corrected(rho, weights="token", mode="mask", lower=0.25, upper=3.0).metrics
    assert got[f"{P}/rollout_is_seq_fraction_high"] == 0.0
    assert got[f"{P}/rollout_is_seq_fraction_low"] == 0.0
    assert got[f"{P}/rollout_is_seq_max_deviation"] == pytest.approx(2.0)
    assert got[f"{P}/rollout_is_seq_mean"] == pytest.approx(3.25 / 2)
    assert (got[f"{P}/rollout_is_seq_max"], got[f"{P}/rollout_is_seq_min"]) == pytest.approx((3.0, 0.25))
    assert got[f"{P}/rollout_is_seq_std"] == pytest.approx(2.75 / math.sqrt(2))


def test_a_single_number_has_no_deviation() -> None:
    got = corrected([[0.5]], weights="token").metrics
    assert f"{P}/rollout_is_std" not in got
    assert f"{P}/rollout_is_seq_std" not in got
    got = corrected([[0.5, 0.5]], weights="token").metrics
    assert got[f"{P}/rollout_is_std"] == 0.0
    assert f"{P}/rollout_is_seq_std" not in got


def test_metrics_of_k1_have_the_sign_of_k1() -> None:
    # rho = 1, -3 and 2 in three samples: k1 = -1, 3, -2.
    got = corrected([[1.0], [-3.0], [2.0]], reject={"token_k1": [0.1, 5.0]}).metrics
    for level in ("", "seq_"):
        name = f"{P}/rollout_rs_token_k1_{level}"
        assert (got[f"{name}mean"], got[f"{name}max"], got[f"{name}min"]) == (0.0, 3.0, -2.0)
    # ln 5 = 1.6 and ln 0.1 = -2.3: one ratio above, one below.
    assert got[f"{P}/rollout_rs_token_k1_fraction_high"] == pytest.approx(1 / 3)
    assert got[f"{P}/rollout_rs_token_k1_fraction_low"] == pytest.approx(1 / 3)
    assert got[f"{P}/rollout_rs_token_k1_seq_max_deviation"] == 3.0
    assert got[f"{P}/rollout_rs_token_k1_masked_fraction"] == pytest.approx(2 / 3)


def test_rejected_shares_are_of_sampled_tokens_and_of_samples_that_have_some() -> None:
    # Two of four sampled tokens, in one of two samples; the third sample has none.
    mask = [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    got = corrected([[3.0, 3.0, 0.0], [0.0, 9.0, 9.0], [9.0, 9.0, 9.0]], mask, reject={"token_k2": 1.0})
    assert got.mask.tolist() == [[False, False, True], [True, False, False], [False] * 3]
    for name in ("rollout_rs", "rollout_rs_token_k2"):
        assert got.metrics[f"{P}/{name}_masked_fraction"] == 0.5
        assert got.metrics[f"{P}/{name}_seq_masked_fraction"] == 0.5


def test_weights_are_0_outside_what_is_trained() -> None:
    got = corrected([[3.0, 0.0, 0.0]], [[1, 1, 0]], weights="token", reject={"token_k2": 1.0})
    assert got.weights is not None
    assert got.weights.tolist() == [[0.0, 1.0, 0.0]]


def test_normalizing_weights_that_are_all_0_leaves_them() -> None:
    got = corrected([[3.0, 3.0]], weights="token", mode="mask", normalize=True)
    assert got.weights is not None
    assert got.weights.tolist() == [[0.0, 0.0]]
    # And without a token left, there is nothing to normalize by.
    got = corrected([[3.0, 3.0]], weights="token", normalize=True, reject={"token_k2": 1.0})
    assert got.weights is not None
    assert not got.weights.any()
    assert f"{P}/rollout_is_batch_norm_factor" not in got.metrics


def test_the_effective_share_is_kishs() -> None:
    # Weights 1 and 3: mean 2, squares of 1/2 and 3/2 have the mean 5/4.
    got = corrected([[0.0, math.log(3.0)]], weights="token", upper=9.0).metrics
    assert got[f"{P}/rollout_is_eff_sample_size"] == pytest.approx(0.8)


def test_extremes_of_the_weights_are_those_before_their_bound() -> None:
    # e^25 is above the bound of 20 on log-ratios that the weights have, and the metrics are not.
    got = corrected([[25.0, -25.0]], weights="token", upper=2.0).metrics
    assert got[f"{P}/rollout_is_max"] == pytest.approx(math.exp(25), rel=1e-5)
    assert got[f"{P}/rollout_is_min"] == pytest.approx(math.exp(-25), rel=1e-5)


@pytest.mark.parametrize(("rule", "sign"), [("token_k1", -1), ("token_k2", 1), ("seq_mean_k3", 1)])
def test_deviations_of_a_rule_are_from_where_trainer_and_rollout_agree(rule: str, sign: int) -> None:
    # One row, log-ratios 0.5 and 0.5: k1 is -0.5, k2 0.125, k3 e^0.5 - 1 - 0.5.
    expected = {"token_k1": 0.5, "token_k2": 0.125, "seq_mean_k3": math.exp(0.5) - 1.5}[rule]
    got = corrected([[0.5, 0.5]], reject={rule: 2.0}).metrics
    assert got[f"{P}/rollout_rs_{rule}_seq_max_deviation"] == pytest.approx(expected, rel=1e-6)
    assert got[f"{P}/rollout_rs_{rule}_mean"] == pytest.approx(sign * expected, rel=1e-6)


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3), (2, 2)), ((2, 3), (3, 2), (2, 3)), ((6,), (6,), (6,))])
def test_shapes_that_do_not_fit(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"needs three tensors of one shape \[B, R\], got"):
        correct(*(torch.zeros(shape) for shape in shapes), CorrectionConfig(weights="token"))


def test_the_first_wrong_log_prob_is_named() -> None:
    good, bad = torch.zeros(2, 2), torch.zeros(2, 2)
    bad[1, 0] = math.inf
    bad[1, 1] = math.nan
    ones, config = torch.ones(2, 2), CorrectionConfig(weights="token")
    with pytest.raises(ValueError, match="rollout_log_probs of sample 1, token 0 is inf"):
        correct(good, bad, ones, config)
    with pytest.raises(ValueError, match="old_log_probs of sample 1, token 0 is inf"):
        correct(bad, good, ones, config)
    assert correct(bad, bad, torch.tensor([[1, 1], [0, 0]]), config).mask.tolist() == [
        [True, True],
        [False, False],
    ]


def test_no_gradient_goes_through_a_correction_or_a_measure() -> None:
    old = double([[0.5, -0.5]]).requires_grad_()
    got = correct(
        old, old * 0.5, torch.ones(1, 2), CorrectionConfig(weights="token", reject={"token_k2": 9.0})
    )
    assert got.weights is not None
    assert not got.weights.requires_grad
    assert not got.mask.requires_grad
    assert mismatch_metrics(old, old * 0.5, torch.ones(1, 2))["training/rollout_probs_diff_valid"] == 1.0
    assert mean_max_min(SCORE, old)["critic/score/mean"] == 0.0
    assert not doubles(old).requires_grad
    assert doubles([1, 2]).dtype == doubles(torch.tensor([1, 2])).dtype == torch.float64


def test_a_token_alone_has_no_deviation_of_probabilities() -> None:
    metrics = mismatch_metrics(double([[-1.0]]), double([[-1.5]]), torch.ones(1, 1))
    assert "training/rollout_probs_diff_std" not in metrics
    assert "training/rollout_actor_probs_pearson_corr" not in metrics
    two = mismatch_metrics(double([[-1.0, -2.0]]), double([[-1.5, -1.5]]), torch.ones(1, 2))
    assert "training/rollout_probs_diff_std" in two
    assert "training/rollout_actor_probs_pearson_corr" not in two


def test_exponents_of_measures_are_bounded_at_20_before_they_are_doubled() -> None:
    rows, zeros = torch.tensor([0, 0]), double([0.0, 0.0])
    up = off_policy_metrics(double([25.0, 15.0]), zeros, rows)
    e20, e15 = math.exp(20), math.exp(15)
    assert up[f"{P}/k3_kl"] == pytest.approx((e20 - 21 + e15 - 16) / 2, rel=1e-12)
    assert up[f"{P}/chi2_token"] == pytest.approx((e20**2 + e15**2) / 2 - 1, rel=1e-12)
    assert up[f"{P}/chi2_seq"] == pytest.approx(e20**2 - 1, rel=1e-12)
    assert up[f"{P}/kl"] == -20.0  # measured before any clamp
    down = off_policy_metrics(double([-25.0, -15.0]), zeros, rows)
    assert down[f"{P}/k3_kl"] == pytest.approx((19 + math.exp(-20) + 14 + math.exp(-15)) / 2, rel=1e-12)
    assert down[f"{P}/chi2_token"] == pytest.approx(-1.0, abs=1e-12)


def test_groups_at_the_bounds_of_the_reward() -> None:
    # Just below solved and just above failed is neither.
    rewards, groups = (
        double([0.999, 0.999, 0.001, 0.001, 1.0, 1.0, 0.0, 0.0]),
        torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
    )
    shares = group_metrics(rewards, groups)
    assert shares == {
        "rollout/groups_all_max": 0.25,
        "rollout/groups_all_min": 0.25,
        "rollout/groups_mixed": 0.0,
        "rollout/groups_all_equal": 0.5,
        "rollout/groups_single": 0.0,
    }


def test_rewards_of_one_sign_in_a_group() -> None:
    # The largest and the smallest start from the group's own values, not from 0.
    shares = group_metrics(double([-2.0, -2.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1]))
    assert (shares["rollout/groups_all_min"], shares["rollout/groups_all_max"]) == (0.5, 0.5)
    assert shares["rollout/groups_mixed"] == 0.0


def test_values_of_a_critic_are_reported_where_there_is_one() -> None:
    ones = torch.ones(1, 2)
    numbers = {"scores": [1.0], "rewards": [1.0], "advantages": ones, "returns": ones, "response_mask": ones}
    assert "critic/values/mean" not in critic_metrics(**numbers)
    with_values = critic_metrics(**numbers, values=double([[2.0, 4.0]]))
    assert (with_values["critic/values/mean"], with_values["critic/values/max"]) == (3.0, 4.0)
    assert list(mean_max_min(SCORE, [True, False]).values()) == [0.5, 1.0, 0.0], "mean, max and min"
    assert mean_max_min(SCORE, []) == {}
