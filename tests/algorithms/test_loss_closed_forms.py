"""Each loss on numbers worked out by hand: terms, gradients of their sum, statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from strop.algorithms.losses import (
    POLICY_LOSS_REGISTRY,
    PolicyLossTerms,
    get_policy_loss_fn,
    policy_loss_terms,
    prepare_columns,
)
from strop.algorithms.losses.cispo import cispo_loss
from strop.algorithms.losses.covariance import (
    clip_cov_loss,
    kl_cov_loss,
    select_clip_cov,
    select_kl_cov,
    token_covariances,
)
from strop.algorithms.losses.dppo import dppo_kl_loss, dppo_tv_loss
from strop.algorithms.losses.gmpo import gmpo_loss
from strop.algorithms.losses.gspo import gspo_loss
from strop.algorithms.losses.policy_gradient import policy_gradient_loss
from strop.algorithms.losses.smooth import dro_loss, sapo_loss
from strop.algorithms.specs import check_loss_settings, policy_loss_declaration

LN2 = math.log(2)


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(got: PolicyLossTerms, log_probs: Tensor) -> Tensor:
    (by_log_probs,) = torch.autograd.grad(got.terms.sum(), log_probs)
    return by_log_probs


def close(got: Tensor, expected: object) -> None:
    torch.testing.assert_close(got, double(expected), rtol=1e-12, atol=1e-12)


def test_gspo_clips_the_ratio_of_the_response() -> None:
    # Token ratios 4 and 1: s = sqrt(4 * 1) = 2. Ranges 0.5 .. 1.5.
    #   A = 1: min(2, 1.5) = 1.5, clipped, no gradient.   A = -1: min(-2, -1.5) = -2, gradient 2 at each token.
    # Ratios 1.44 and 1: s = 1.2, within: terms -1.2 A, gradient -1.2 A at each token.
    old = torch.zeros(3, 2, dtype=torch.float64)
    log_probs = double([[4.0, 1.0], [4.0, 1.0], [1.44, 1.0]]).log().requires_grad_()
    advantages = double([[1.0, 1.0], [-1.0, -1.0], [3.0, 3.0]])
    rows = torch.tensor([[0, 0], [1, 1], [2, 2]])
    got = gspo_loss(
        log_probs, old, advantages, torch.ones(3, 2, dtype=torch.bool), rows, clip_low=0.5, clip_high=0.5
    )
    close(got.terms.detach(), [[-1.5, -1.5], [2.0, 2.0], [-3.6, -3.6]])
    close(gradient(got, log_probs), [[0.0, 0.0], [2.0, 2.0], [-3.6, -3.6]])
    close(got.statistics["ratio"], [[2.0, 2.0], [2.0, 2.0], [1.2, 1.2]])
    close(got.statistics["pg_clipfrac"], [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    close(got.statistics["ppo_kl"], [[-2 * LN2, 0.0], [-2 * LN2, 0.0], [-math.log(1.44), 0.0]])


def test_gspo_of_equal_advantages_is_the_clipped_objective_of_the_response() -> None:
    # The paper's objective of a response, min(s A, clip(s) A) with s = exp(mean d), differentiated by autograd
    # through s, must have the gradient of the mean of the terms.
    d = double([0.1, -0.3, 0.05, 0.02])
    for advantage in (2.0, -2.0):
        through_s = d.clone().requires_grad_()
        s = through_s.mean().exp()
        objective = torch.minimum(s * advantage, s.clamp(0.97, 1.03) * advantage)
        (expected,) = torch.autograd.grad(-objective, through_s)
        log_probs = d.clone().requires_grad_()
        got = gspo_loss(
            log_probs,
            torch.zeros(4, dtype=torch.float64),
            torch.full((4,), advantage, dtype=torch.float64),
            torch.ones(4, dtype=torch.bool),
            torch.zeros(4, dtype=torch.int64),
            clip_low=0.03,
            clip_high=0.03,
        )
        torch.testing.assert_close(got.terms.mean(), -objective)
        (seen,) = torch.autograd.grad(got.terms.mean(), log_probs)
        torch.testing.assert_close(seen, expected)


def test_gmpo_clips_each_log_ratio_on_the_side_of_its_advantage() -> None:
    # Log range 0.4. A = 1: log-ratios 1 and -0.6 become min(1, 0.4) = 0.4 and -0.6; mean -0.1.
    #   value -e^-0.1 at both tokens; sum of both has gradient 0 and -e^-0.1.
    # A = -2: -1 and 0.6 become max(-1, -0.4) = -0.4 and 0.6; mean 0.1; value 2 e^0.1.
    log_probs = double([[1.0, -0.6], [-1.0, 0.6]]).requires_grad_()
    advantages = double([[1.0, 1.0], [-2.0, -2.0]])
    got = gmpo_loss(
        log_probs,
        torch.zeros(2, 2, dtype=torch.float64),
        advantages,
        torch.ones(2, 2, dtype=torch.bool),
        torch.tensor([[0, 0], [1, 1]]),
        clip_low=0.4,
        clip_high=0.4,
    )
    up, down = math.exp(0.1), math.exp(-0.1)
    close(got.terms.detach(), [[-down, -down], [2 * up, 2 * up]])
    close(gradient(got, log_probs), [[0.0, -down], [0.0, 2 * up]])
    close(got.statistics["ratio"], [[down, down], [up, up]])
    close(got.statistics["pg_clipfrac"], [[1.0, 0.0], [1.0, 0.0]])


def test_gmpo_takes_the_mean_of_advantages_that_differ_and_skips_those_of_zero() -> None:
    # A = 2, 0, 1 with log-ratios 0.3, 9, -0.3: the second counts as 0, the mean log-ratio is 0, the ratio 1;
    # value -mean(A) = -1 at each token.
    log_probs = double([0.3, 9.0, -0.3]).requires_grad_()
    got = gmpo_loss(
        log_probs,
        torch.zeros(3, dtype=torch.float64),
        double([2.0, 0.0, 1.0]),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.int64),
        clip_low=0.4,
        clip_high=0.4,
    )
    close(got.terms.detach(), [-1.0, -1.0, -1.0])
    close(gradient(got, log_probs), [-1.0, 0.0, -1.0])
    close(got.statistics["pg_clipfrac"], [0.0, 0.0, 0.0])


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    # Range 0.8 .. 1.3; ratios 2, 1/2, 1.1 -> weights 1.3, 0.8, 1.1. Term -w A l, gradient -w A.
    old = double([0.25, 0.5, 0.5]).log()
    log_probs = double([0.5, 0.25, 0.55]).log().requires_grad_()
    got = cispo_loss(log_probs, old, double([2.0, -1.0, 1.0]), clip_low=0.2, clip_high=0.3)
    close(got.terms.detach(), [2.6 * LN2, 0.8 * math.log(0.25), -1.1 * math.log(0.55)])
    close(gradient(got, log_probs), [-2.6, 0.8, -1.1])
    close(got.statistics["pg_clipfrac"], [1.0, 1.0, 0.0])
    close(got.statistics["ratio"], [2.0, 0.5, 1.1])


def test_dppo_tv_drops_tokens_whose_probability_moved_too_far_with_their_advantage() -> None:
    # Probability 0.25 -> 0.5 is a move of 0.25, 0.5 -> 0.25 one of -0.25. Range 0.2 down, 0.3 up, then 0.2 up.
    old = double([0.25, 0.25, 0.5, 0.5]).log()
    log_probs = double([0.5, 0.5, 0.25, 0.25]).log().requires_grad_()
    advantages = double([1.0, -1.0, 1.0, -1.0])
    got = dppo_tv_loss(log_probs, old, advantages, clip_low=0.2, clip_high=0.3)
    close(gradient(got, log_probs), [-2.0, 2.0, -0.5, 0.0])
    got = dppo_tv_loss(log_probs, old, advantages, clip_low=0.3, clip_high=0.2)
    close(gradient(got, log_probs), [0.0, 2.0, -0.5, 0.5])
    close(got.terms.detach(), [0.0, -2 * LN2, 0.5 * 2 * LN2, -0.5 * 2 * LN2])
    close(got.statistics["pg_clipfrac"], [1.0, 0.0, 0.0, 0.0])


def test_dppo_truncates_the_weight_at_20_unless_told_otherwise() -> None:
    # 0.01 -> 0.5 is a ratio of 50; the advantage is negative, so the move up is none with it.
    log_probs = double([0.5]).log().requires_grad_()
    for loss in (dppo_tv_loss, dppo_kl_loss):
        got = loss(log_probs, double([0.01]).log(), double([-1.0]), clip_low=0.2, clip_high=0.2)
        close(gradient(got, log_probs), [20.0])
        close(got.statistics["pg_clipfrac_lower"], [1.0])
        got = loss(
            log_probs, double([0.01]).log(), double([-1.0]), clip_low=0.2, clip_high=0.2, truncation=60.0
        )
        close(gradient(got, log_probs), [50.0])
        with pytest.raises(
            ValueError, match=r"truncation of the importance weight is 0\.0; use a number above 0"
        ):
            loss(log_probs, log_probs, log_probs, clip_low=0.2, clip_high=0.2, truncation=0.0)


def test_dppo_kl_measures_the_divergence_of_this_token_against_all_others() -> None:
    # 0.5 -> 0.75: kl = 0.5 ln(0.5/0.75) + 0.5 ln(0.5/0.25) = 0.1438 nats; weight 1.5.
    log_probs, old = double([0.75, 0.75]).log().requires_grad_(), double([0.5, 0.5]).log()
    advantages = double([1.0, -1.0])
    tight = dppo_kl_loss(log_probs, old, advantages, clip_low=0.14, clip_high=0.14)
    close(gradient(tight, log_probs), [0.0, 1.5])  # the second has a way back
    loose = dppo_kl_loss(log_probs, old, advantages, clip_low=0.1, clip_high=0.145)
    close(gradient(loose, log_probs), [-1.5, 1.5])
    # 0.5 -> 0.25 has the same divergence by symmetry; now the negative advantage is the one that leads away.
    log_probs = double([0.25, 0.25]).log().requires_grad_()
    tight = dppo_kl_loss(log_probs, old, advantages, clip_low=0.14, clip_high=0.145)
    close(gradient(tight, log_probs), [-0.5, 0.0])


def test_dppo_kl_of_a_sure_token_is_finite() -> None:
    log_probs = torch.tensor([0.0, 1e-7, -1e-7], requires_grad=True)
    got = dppo_kl_loss(log_probs, torch.zeros(3), torch.ones(3), clip_low=0.2, clip_high=0.2)
    assert torch.isfinite(got.terms).all()
    assert torch.isfinite(gradient(got, log_probs)).all()


def test_sapo_fades_with_the_distance_of_the_ratio_from_one() -> None:
    # Ratio 2, A = 1, tau 1: sigmoid(1) = 0.7310585786300049; term -4 * that; gradient -4 s (1 - s) * 2.
    # Ratio 2, A = -1, tau 2: sigmoid(2) = 0.8807970779778823; term 2 * that; gradient 4 s (1 - s) * 2.
    # Ratio 1: term -A * 2 / tau, gradient -A.
    one, two = 0.7310585786300049, 0.8807970779778823
    log_probs = double([LN2, LN2, 0.0, 0.0]).requires_grad_()
    advantages = double([1.0, -1.0, 3.0, -3.0])
    got = sapo_loss(log_probs, torch.zeros(4, dtype=torch.float64), advantages, tau_pos=1.0, tau_neg=2.0)
    close(got.terms.detach(), [-4 * one, 2 * two, -6.0, 3.0])
    close(gradient(got, log_probs), [-8 * one * (1 - one), 8 * two * (1 - two), -3.0, 3.0])
    assert set(got.statistics) == {"ratio", "ppo_kl"}
    with pytest.raises(ValueError, match=r"tau_neg 0; use 1\.0 and 1\.05"):
        sapo_loss(log_probs, log_probs, advantages, tau_neg=0)


def test_dro_pulls_back_by_its_beta_times_the_move() -> None:
    # l = -1, old = -1.5, A = 2, beta 0.4: -(2 * -1 - 0.2 * 0.25) = 2.05; gradient -(2 - 0.4 * 0.5) = -1.8.
    log_probs = double([-1.0]).requires_grad_()
    got = dro_loss(log_probs, double([-1.5]), double([2.0]), dro_beta=0.4)
    close(got.terms.detach(), [2.05])
    close(gradient(got, log_probs), [-1.8])
    with pytest.raises(ValueError, match="dro_beta is 0, but it weighs the only bound"):
        dro_loss(log_probs, log_probs, log_probs, dro_beta=0)


def test_gpg_is_the_plain_policy_gradient_whatever_the_old_policy() -> None:
    log_probs = double([-1.0, -2.0]).requires_grad_()
    got = policy_gradient_loss(log_probs, double([-5.0, 0.0]), double([2.0, -3.0]))
    close(got.terms.detach(), [2.0, -6.0])
    close(gradient(got, log_probs), [-2.0, 3.0])
    close(got.statistics["ratio"], [math.exp(4), math.exp(-2)])


# A = 3, -1, -1, -1 has mean 0; log-probs -0.5, -1.5, -1.5, -2.5 have mean -1.5. Covariances: 3, 0, 0, 1.
COV_LOG_PROBS = (-0.5, -1.5, -1.5, -2.5)
COV_ADVANTAGES = (3.0, -1.0, -1.0, -1.0)


def test_clip_cov_takes_the_gradient_from_a_token_of_high_covariance() -> None:
    log_probs = double(COV_LOG_PROBS).requires_grad_()
    columns = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach(),
        "advantages": double(COV_ADVANTAGES),
    }
    mask, clip = torch.ones(4, dtype=torch.bool), {"clip_low": 0.2, "clip_high": 0.2}
    # Bounds 1 .. 5 exclude the covariance of exactly 1, so the first token is the only candidate.
    prepared = prepare_columns("clip_cov", mask=mask, columns=columns, settings=clip)
    assert prepared["cov_selected"].tolist() == [True, False, False, False]
    got = policy_loss_terms("clip_cov", mask=mask, columns={**columns, **prepared}, settings=clip)
    close(got.terms.detach(), [0.0, 1.0, 1.0, 1.0])
    close(gradient(got, log_probs), [0.0, 1.0, 1.0, 1.0])
    close(got.statistics["cov_clipfrac"], [1.0, 0.0, 0.0, 0.0])


def test_clip_cov_leaves_out_tokens_that_ppo_clips_and_draws_none_where_none_qualifies() -> None:
    # The first token's ratio is e^0.5 > 1.2 at a positive advantage: PPO's clip has it already.
    old = double([-1.0, *COV_LOG_PROBS[1:]])
    arguments = {
        "log_probs": double(COV_LOG_PROBS),
        "old_log_probs": old,
        "advantages": double(COV_ADVANTAGES),
        "response_mask": torch.ones(4, dtype=torch.bool),
        "clip_low": 0.2,
        "clip_high": 0.2,
    }
    assert not select_clip_cov(**arguments)["cov_selected"].any()
    wider = select_clip_cov(**arguments, clip_cov_lb=0.5)["cov_selected"]
    assert wider.tolist() == [False, False, False, True]


def test_kl_cov_penalises_the_token_of_highest_covariance() -> None:
    # Old log-probs lie 0.5 below the new ones: ratio e^0.5. Coefficient 0.1: +0.05 on the first token alone, whose
    # gradient gains 0.1.
    log_probs = double(COV_LOG_PROBS).requires_grad_()
    columns = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach() - 0.5,
        "advantages": double(COV_ADVANTAGES),
    }
    mask, settings = torch.ones(4, dtype=torch.bool), {"ppo_kl_coef": 0.1}
    prepared = prepare_columns("kl_cov", mask=mask, columns=columns, settings=settings)
    got = policy_loss_terms("kl_cov", mask=mask, columns={**columns, **prepared}, settings=settings)
    r = math.exp(0.5)
    close(got.terms.detach(), [-3 * r + 0.05, r, r, r])
    close(gradient(got, log_probs), [-3 * r + 0.1, r, r, r])
    close(got.statistics["kl_cov_frac"], [1.0, 0.0, 0.0, 0.0])


def test_kl_cov_gives_a_token_that_has_not_moved_but_for_rounding_no_direction() -> None:
    log_probs = double(COV_LOG_PROBS).requires_grad_()
    columns = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach() + double([1e-9, -1e-9, 0.0, 0.0]),
        "advantages": double(COV_ADVANTAGES),
        "cov_selected": torch.ones(4, dtype=torch.bool),
    }
    got = policy_loss_terms("kl_cov", mask=torch.ones(4, dtype=torch.bool), columns=columns, settings={})
    torch.testing.assert_close(gradient(got, log_probs), double([-3, 1, 1, 1]), rtol=0, atol=1e-8)


def test_covariances_are_those_under_the_mask() -> None:
    # With the last token masked, A = 3, -1, -1 has mean 1/3 and the log-probs mean -7/6: covariances 16/9, 4/9, 4/9.
    mask = torch.tensor([True, True, True, False])
    log_probs, advantages = double([*COV_LOG_PROBS[:3], math.nan]), double([*COV_ADVANTAGES[:3], 99.0])
    close(token_covariances(log_probs, advantages, mask)[mask], [16 / 9, 4 / 9, 4 / 9])
    # Half of three tokens is one.
    columns = {"log_probs": log_probs, "advantages": advantages}
    got = prepare_columns("kl_cov", mask=mask, columns=columns, settings={"kl_cov_ratio": 0.5})
    assert got["cov_selected"].tolist() == [True, False, False, False]


def test_kl_cov_takes_its_share_of_the_tokens() -> None:
    log_probs = torch.arange(10, dtype=torch.float64) - 20
    advantages = torch.arange(10, dtype=torch.float64)
    got = select_kl_cov(
        log_probs=log_probs,
        advantages=advantages,
        response_mask=torch.ones(10, dtype=torch.bool),
        kl_cov_ratio=0.49,
    )
    # (t - 4.5)^2: the ends come first; among equals the first token.
    assert got["cov_selected"].nonzero().flatten().tolist() == [0, 1, 8, 9]


@pytest.fixture
def many_tokens() -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(2000, generator=generator, dtype=torch.float64)
    return {
        "log_probs": log_probs,
        "old_log_probs": log_probs.clone(),
        "advantages": torch.randn(2000, generator=generator, dtype=torch.float64),
        "response_mask": torch.ones(2000, dtype=torch.bool),
    }


def draw(columns: Mapping[str, Tensor], *, share: float = 0.05, seed: int = 0) -> Tensor:
    bounds = {"clip_cov_lb": -100.0, "clip_cov_ub": 100.0, "clip_cov_ratio": share}
    return select_clip_cov(**columns, clip_low=0.2, clip_high=0.2, seed=seed, **bounds)["cov_selected"]


def test_clip_cov_draws_its_share_by_the_seed_and_by_what_a_token_is(
    many_tokens: Mapping[str, Tensor],
) -> None:
    first = draw(many_tokens)
    assert int(first.sum()) == 100
    assert torch.equal(first, draw(many_tokens))
    torch.manual_seed(1)
    assert torch.equal(first, draw(many_tokens))
    overlap = int((first & draw(many_tokens, seed=1)).sum())
    assert overlap < 20  # 5 of 100 are expected of an independent draw
    rounded = {**many_tokens, "old_log_probs": many_tokens["old_log_probs"] * (1 + 2e-16)}
    assert torch.equal(first, draw(rounded))
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(draw({key: column[order] for key, column in many_tokens.items()}), first[order])


def test_clip_cov_draws_uniformly(many_tokens: Mapping[str, Tensor]) -> None:
    # 200 seeds of a tenth: each half of the tokens gets 20000 of 40000 draws, with a standard deviation of about
    # 100 * sqrt(1 / 2 * 1 / 2 * 4 * 0.9) < 100.
    counts = sum(draw(many_tokens, share=0.1, seed=seed).long() for seed in range(200))
    assert isinstance(counts, Tensor)
    assert int(counts.sum()) == 40_000
    assert abs(int(counts[:1000].sum()) - 20_000) < 500
    assert int(counts.max()) < 60  # 20 are expected, with a standard deviation of 4.2
    assert int(counts.min()) > 2


def test_clip_cov_tells_equal_tokens_apart_by_their_order() -> None:
    same = {
        "log_probs": torch.full((1000,), -1.0),
        "old_log_probs": torch.full((1000,), -1.0),
        "advantages": torch.ones(1000),
        "response_mask": torch.ones(1000, dtype=torch.bool),
    }
    chosen = draw(same, share=0.1)
    assert int(chosen.sum()) == 100
    assert 25 < int(chosen[:500].sum()) < 75  # 50 +- 5


def test_names_of_verl_lead_to_the_same_functions() -> None:
    assert POLICY_LOSS_REGISTRY["geo_mean"] is gmpo_loss is get_policy_loss_fn("gmpo")
    assert POLICY_LOSS_REGISTRY["gspo_token"] is gspo_loss is get_policy_loss_fn("gspo")
    assert POLICY_LOSS_REGISTRY["reinforce"] is policy_gradient_loss is get_policy_loss_fn("gpg")
    assert POLICY_LOSS_REGISTRY["clip_cov"] is clip_cov_loss
    assert POLICY_LOSS_REGISTRY["kl_cov"] is kl_cov_loss


def test_losses_that_weigh_responses_alike_declare_it() -> None:
    declared = {name: policy_loss_declaration(name).aggregation for name in POLICY_LOSS_REGISTRY}
    alike = {name for name, mode in declared.items() if mode == "seq-mean-token-mean"}
    assert alike == {"gspo", "gspo_token", "gmpo", "geo_mean", "sapo"}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sapo", {"tau_po": 1.0}, "'sapo' has no setting 'tau_po'; did you mean 'tau_pos'"),
        ("clip_cov", {"clip_cov_ration": 0.1}, "did you mean 'clip_cov_ratio'"),
        ("gspo", {"tau": 1.0}, "'gspo' has no setting 'tau'; it has none"),
        ("vanilla", {"clip_c": 10.0}, "key of its own: set algorithm.clip_ratio_c"),
        ("dppo_tv", {"clip_c": 10.0}, "has no setting 'clip_c'; did you mean 'truncation'"),
        (
            "dro",
            {"dro_beta": "high"},
            "'dro_beta' of policy loss 'dro' is 'high'; it must be a number, .* 1.0",
        ),
        ("clip_cov", {"seed": 1.5}, "'seed' .* is 1.5; it must be a whole number"),
        ("dro", {"dro_beta": True}, "it must be a number"),
    ],
)
def test_settings_a_loss_does_not_have_are_refused(
    name: str, settings: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_loss_settings(name, settings)


def test_settings_a_loss_has_are_taken_and_reach_it() -> None:
    check_loss_settings("dppo_kl", {"truncation": 5})
    check_loss_settings("clip_cov", {"clip_cov_lb": 0.5, "seed": 3})
    log_probs = double([0.5]).log().requires_grad_()
    columns = {"log_probs": log_probs, "old_log_probs": double([0.01]).log(), "advantages": double([-1.0])}
    settings = {"clip_low": 0.2, "clip_high": 0.2, "clip_c": 3.0, "truncation": 5}
    got = policy_loss_terms("dppo_tv", mask=torch.ones(1), columns=columns, settings=settings)
    close(gradient(got, log_probs), [5.0])


def test_flat_columns_without_row_numbers_are_refused_by_a_loss_per_response() -> None:
    columns = {name: torch.zeros(3) for name in ("log_probs", "old_log_probs", "advantages")}
    with pytest.raises(
        ValueError, match="'gspo' needs the columns row_ids, .*give row_ids, the row number of each"
    ):
        policy_loss_terms(
            "gspo", mask=torch.ones(3), columns=columns, settings={"clip_low": 0.2, "clip_high": 0.2}
        )


def test_statistics_of_the_whole_batch_that_are_missing_are_named() -> None:
    columns = {name: torch.zeros(3) for name in ("log_probs", "old_log_probs", "advantages")}
    with pytest.raises(
        ValueError, match="cov_selected is computed once per optimizer batch: give what prepare_columns"
    ):
        policy_loss_terms("kl_cov", mask=torch.ones(3), columns=columns, settings={})
    assert prepare_columns("vanilla", mask=torch.ones(3), columns={}, settings={}) == {}
