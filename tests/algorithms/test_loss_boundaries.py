"""Losses exactly at their bounds, where `<` and `<=` part, and in the corners that no ordinary batch has."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.algorithms.losses import POLICY_LOSS_REGISTRY, PolicyLossTerms, policy_loss_terms
from strop.algorithms.losses.clipped import clipped_policy_loss
from strop.algorithms.losses.covariance import clip_cov_loss, select_clip_cov, select_kl_cov
from strop.algorithms.losses.distillation import reverse_kl_terms, topk_forward_kl
from strop.algorithms.losses.dppo import dppo_kl_loss, dppo_tv_loss
from strop.algorithms.losses.gmpo import gmpo_loss
from strop.algorithms.losses.gspo import gspo_loss, row_means
from strop.algorithms.losses.smooth import dro_loss, sapo_loss
from strop.algorithms.losses.terms import call_loss, call_prepare
from strop.algorithms.registry import Declaration
from strop.algorithms.specs import policy_loss_declaration
from strop.utils.rng import random_key, uniforms

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(got: PolicyLossTerms, log_probs: Tensor) -> list[float]:
    (by_log_probs,) = torch.autograd.grad(got.terms.sum(), log_probs)
    return by_log_probs.tolist()


def test_a_loss_that_just_reaches_the_cap_is_not_capped() -> None:
    # Ratio 1 and a cap at 1: both sides of the dual clip are 1.
    got = clipped_policy_loss(double([0.0]), double([0.0]), double([-1.0]), **CLIP, clip_c=1.0)
    assert got.terms.tolist() == [1.0]
    assert got.statistics["pg_clipfrac_lower"].tolist() == [0.0]


def test_clip_cov_counts_as_clipped_what_the_clip_changed() -> None:
    # Ratios 1 (unmoved), e^0.5 (clipped to 1.2 at A = 1) and e^0.5 at A = -1, where the worse side stays.
    log_probs, advantages = double([0.0, 0.5, 0.5]), double([1.0, 1.0, -1.0])
    none = torch.zeros(3, dtype=torch.bool)
    got = clip_cov_loss(log_probs, torch.zeros(3, dtype=torch.float64), advantages, none, **CLIP)
    assert got.statistics["pg_clipfrac"].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(got.terms, double([-1.0, -1.2, math.exp(0.5)]))


# A = 3, -1, -1, -1 and log-probs -0.5, -1.5, -1.5, -2.5 have the covariances 3, 0, 0, 1.
COVARIANT = {
    "log_probs": double([-0.5, -1.5, -1.5, -2.5]),
    "advantages": double([3.0, -1.0, -1.0, -1.0]),
    "response_mask": torch.ones(4, dtype=torch.bool),
}


@pytest.mark.parametrize(
    ("low", "high", "chosen"),
    [
        (0.5, 3.0, [3]),  # a covariance of 3 is not below 3
        (0.5, 3.1, [0, 3]),
        (1.0, 3.1, [0]),  # one of 1 is not above 1
        (3.0, 9.0, []),
    ],
)
def test_clip_cov_draws_strictly_between_its_bounds(low: float, high: float, chosen: list[int]) -> None:
    got = select_clip_cov(
        **COVARIANT,
        old_log_probs=COVARIANT["log_probs"],
        **CLIP,
        clip_cov_lb=low,
        clip_cov_ub=high,
        clip_cov_ratio=1.0,
    )
    assert got["cov_selected"].nonzero().flatten().tolist() == chosen


@pytest.mark.parametrize(("share", "count"), [(0.0, 1), (0.49, 1), (0.5, 2), (0.74, 2), (0.75, 3), (1.0, 4)])
def test_at_least_one_token_and_else_the_share_rounded_down(share: float, count: int) -> None:
    assert int(select_kl_cov(**COVARIANT, kl_cov_ratio=share)["cov_selected"].sum()) == count
    drawn = select_clip_cov(
        **COVARIANT,
        old_log_probs=COVARIANT["log_probs"],
        **CLIP,
        clip_cov_lb=-9.0,
        clip_cov_ub=9.0,
        clip_cov_ratio=share,
    )
    assert int(drawn["cov_selected"].sum()) == count


def test_shares_are_of_the_tokens_under_the_mask() -> None:
    # Half of two tokens is one. Of the two, A = 3 and -1 with log-probs -0.5 and -1.5, both covariances are 1.
    mask = torch.tensor([True, True, False, False])
    columns = COVARIANT | {"response_mask": mask}
    assert select_kl_cov(**columns, kl_cov_ratio=0.5)["cov_selected"].tolist() == [True, False, False, False]
    drawn = select_clip_cov(
        **columns,
        old_log_probs=columns["log_probs"],
        **CLIP,
        clip_cov_lb=0.0,
        clip_cov_ub=9.0,
        clip_cov_ratio=0.5,
    )["cov_selected"]
    assert int(drawn.sum()) == 1
    assert not drawn[2:].any()


def test_clip_cov_draws_only_what_ppo_leaves_alone_on_either_side() -> None:
    # Ratios 0.7, 0.9, 1.1, 1.5 with either sign: PPO with 0.2 and 0.4 clips 1.5 at A = 1, and 0.7 at A = -1.
    log_probs = double([0.7, 0.9, 1.1, 1.5] * 2).log()
    got = select_clip_cov(
        log_probs=log_probs,
        old_log_probs=torch.zeros(8, dtype=torch.float64),
        advantages=double([1.0] * 4 + [-1.0] * 4),
        response_mask=torch.ones(8, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.4,
        clip_cov_lb=-9.0,
        clip_cov_ub=9.0,
        clip_cov_ratio=1.0,
    )["cov_selected"]
    assert got.tolist() == [True, True, True, False, False, True, True, True]


def drawn_by_hand(old: Sequence[float], advantages: Sequence[float], seed: int, count: int) -> set[int]:
    """The tokens of the smallest uniform numbers; number k of a key made of the bits of what the token is."""

    def bits(value: float) -> int:
        rounded = float(round(value * 1024))  # so that rounding in the last digits draws no other token
        return int.from_bytes(struct.pack("<d", rounded or 0.0), "little")

    numbers = []
    seen: dict[int, int] = {}
    for a, b in zip(old, advantages, strict=True):
        # The two multipliers of the finalizer of MurmurHash3.
        key = bits(a) * 0xFF51AFD7ED558CCD + bits(b) * 0xC4CEB9FE1A85EC53 + random_key(seed, "clip_cov")
        key %= 2**64
        repeat = seen[key] = seen.get(key, -1) + 1
        numbers.append(float(uniforms(np.array([key], dtype=np.uint64), np.array([repeat]))[0]))
    return set(sorted(range(len(numbers)), key=lambda token: (numbers[token], token))[:count])


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_the_draw_is_a_function_of_seed_log_prob_and_advantage(seed: int) -> None:
    # Some tokens are equal to others, and some zeros are negative.
    generator = torch.Generator().manual_seed(seed)
    old = -torch.randint(0, 3, (40,), generator=generator).to(torch.float64) / 2
    advantages = torch.randint(-2, 3, (40,), generator=generator).to(torch.float64)
    advantages = torch.where((advantages == 0) & (torch.arange(40) % 2 == 0), -0.0, advantages)
    got = select_clip_cov(
        log_probs=old,
        old_log_probs=old,
        advantages=advantages,
        response_mask=torch.ones(40, dtype=torch.bool),
        **CLIP,
        clip_cov_lb=-99.0,
        clip_cov_ub=99.0,
        clip_cov_ratio=0.25,
        seed=seed,
    )["cov_selected"]
    assert set(got.nonzero().flatten().tolist()) == drawn_by_hand(old.tolist(), advantages.tolist(), seed, 10)


def test_dppo_tv_keeps_a_token_that_moved_by_exactly_its_range() -> None:
    old, log_probs = double([0.25]).log(), double([0.5]).log()
    moved = float((log_probs.exp() - old.exp())[0])
    for advantage, clips in (
        (1.0, {"clip_low": 9.0, "clip_high": moved}),
        (0.0, {"clip_low": 0.0, "clip_high": 0.0}),
    ):
        got = dppo_tv_loss(log_probs, old, double([advantage]), **clips)
        assert got.statistics["pg_clipfrac"].tolist() == [0.0]
    for advantage in (-1.0, 0.0):
        got = dppo_tv_loss(old, log_probs, double([advantage]), clip_low=moved, clip_high=9.0)
        assert got.statistics["pg_clipfrac"].tolist() == [0.0]
        got = dppo_tv_loss(old, log_probs, double([advantage]), clip_low=moved - 1e-9, clip_high=9.0)
        assert got.statistics["pg_clipfrac"].tolist() == [1.0]


def binary_kl(old: Tensor, log_probs: Tensor) -> float:
    p, p_old = log_probs.exp(), old.exp()
    return float(
        (p_old * (old - log_probs) + (1 - p_old) * torch.log((1 - p_old + 1e-8) / (1 - p + 1e-8)))[0]
    )


@pytest.mark.parametrize(("advantage", "now"), [(1.0, 0.75), (-1.0, 0.25), (0.0, 0.25)])
def test_dppo_kl_keeps_a_token_at_exactly_its_divergence(advantage: float, now: float) -> None:
    old, log_probs = double([0.5]).log(), double([now]).log()
    limit = binary_kl(old, log_probs)
    ranges = ("clip_high", "clip_low") if advantage > 0 else ("clip_low", "clip_high")
    for bound, outside in ((limit, 0.0), (limit * (1 - 1e-9), 1.0)):
        clips = {ranges[0]: bound, ranges[1]: 99.0}
        got = dppo_kl_loss(log_probs, old, double([advantage]), **clips)
        assert got.statistics["pg_clipfrac"].tolist() == [outside]


def test_dppo_kl_of_advantage_zero_goes_by_the_range_of_negative_ones() -> None:
    # Moved up: a positive advantage would be outside of a range of 0, a negative one has a way back.
    got = dppo_kl_loss(double([0.75]).log(), double([0.5]).log(), double([0.0]), clip_low=0.0, clip_high=0.0)
    assert got.statistics["pg_clipfrac"].tolist() == [0.0]


@pytest.mark.parametrize("loss", [dppo_tv_loss, dppo_kl_loss])
def test_a_weight_that_just_reaches_the_truncation_is_not_truncated(loss: object) -> None:
    assert callable(loss)
    log_probs = double([-1.0]).requires_grad_()
    got = loss(log_probs, double([-1.0]), double([2.0]), **CLIP, truncation=1.0)
    assert got.statistics["pg_clipfrac_lower"].tolist() == [0.0]
    assert gradient(got, log_probs) == [-2.0]
    # A token that is left out altogether is not called truncated as well.
    got = loss(double([-0.01]), double([-4.0]), double([2.0]), **CLIP, truncation=1.0)
    assert got.statistics["pg_clipfrac"].tolist() == [1.0]
    assert got.statistics["pg_clipfrac_lower"].tolist() == [0.0]


def test_any_divisor_or_weight_above_zero_will_do() -> None:
    one, tiny = double([0.0]), 1e-9
    for taus in ({"tau_pos": tiny}, {"tau_neg": tiny}):
        assert sapo_loss(one, one, one, **taus).terms.tolist() == [0.0]
    for name in ("tau_pos", "tau_neg"):
        for wrong in (0.0, -1.0):
            with pytest.raises(ValueError, match="sapo divides by its taus"):
                sapo_loss(one, one, one, **{name: wrong})
    assert dro_loss(one, one, one, dro_beta=tiny).terms.tolist() == [0.0]
    assert dppo_tv_loss(one, one, one, **CLIP, truncation=tiny).terms.tolist() == [0.0]


def test_the_ratio_of_a_response_is_bounded_above_by_e_to_the_10_and_below_by_e_to_the_minus_20() -> None:
    # A negative advantage, which no clip bounds, and a positive one with clips far away.
    rows, mask = torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)
    got = gspo_loss(
        double([50.0, -50.0]),
        torch.zeros(2, dtype=torch.float64),
        double([-1.0, 1.0]),
        mask,
        rows,
        clip_low=1.0,
        clip_high=0.2,
    )
    torch.testing.assert_close(
        got.statistics["ratio"], double([math.exp(10), math.exp(-20)]), rtol=1e-12, atol=0
    )


def test_gmpo_bounds_every_log_ratio_at_20() -> None:
    # With ranges beyond 20 only the bound acts: log-ratios 50 and -50 on rows of one token.
    rows, mask, old = (
        torch.tensor([0, 1]),
        torch.ones(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.float64),
    )
    got = gmpo_loss(
        double([50.0, -50.0]), old, double([1.0, -1.0]), mask, rows, clip_low=99.0, clip_high=99.0
    )
    torch.testing.assert_close(
        got.statistics["ratio"], double([math.exp(20), math.exp(-20)]), rtol=1e-12, atol=0
    )
    # The bound is no clip: a log-ratio at the edge of its range, or beyond 20, has not been clipped.
    assert got.statistics["pg_clipfrac"].tolist() == [0.0, 0.0]
    got = gmpo_loss(double([0.4, -0.4]), old, double([1.0, -1.0]), mask, rows, clip_low=0.4, clip_high=0.4)
    assert got.statistics["pg_clipfrac"].tolist() == [0.0, 0.0]


def test_gmpo_is_zero_outside_the_mask() -> None:
    mask = torch.tensor([True, False])
    got = gmpo_loss(
        double([0.1, 0.0]),
        double([0.0, 0.0]),
        double([1.0, 0.0]),
        mask,
        torch.zeros(2, dtype=torch.int64),
        **CLIP,
    )
    torch.testing.assert_close(got.terms, double([-math.exp(0.1), 0.0]))


def test_means_of_rows_in_any_order_with_gaps_and_without_tokens() -> None:
    # Row 0: 1 and 3; row 1: nothing under the mask; row 2: 5; row 3, the last: nothing.
    values = double([5.0, 1.0, 9.0, 3.0, 9.0, 9.0])
    rows, mask = torch.tensor([2, 0, 1, 0, 0, 3]), torch.tensor([True, True, False, True, False, False])
    assert row_means(values, mask, rows).tolist() == [5.0, 2.0, 0.0, 2.0, 2.0, 0.0]
    assert row_means(values.reshape(2, 3), mask.reshape(2, 3), rows.reshape(2, 3)).tolist() == [
        [5.0, 2.0, 0.0],
        [2.0, 2.0, 0.0],
    ]


@pytest.mark.parametrize("advantage", [0.25, -0.25])
def test_gmpo_goes_by_the_sign_of_an_advantage_however_small(advantage: float) -> None:
    # Ranges 0.1 down and 0.4 up. A > 0 bounds above: 1 becomes 0.4, -1 stays. A < 0 bounds below: -1 becomes -0.1.
    rows, mask, old = (
        torch.tensor([0, 1]),
        torch.ones(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.float64),
    )
    both = double([advantage, advantage])
    got = gmpo_loss(double([1.0, -1.0]), old, both, mask, rows, clip_low=0.1, clip_high=0.4)
    bounded = [0.4, -1.0] if advantage > 0 else [1.0, -0.1]
    torch.testing.assert_close(got.statistics["ratio"], double(bounded).exp())
    assert got.statistics["pg_clipfrac"].tolist() == ([1.0, 0.0] if advantage > 0 else [0.0, 1.0])


@pytest.mark.parametrize("advantage", [0.25, -0.25])
def test_sapo_and_dppo_go_by_the_sign_of_an_advantage_however_small(advantage: float) -> None:
    log_probs, old, a = double([0.5]).log(), double([0.25]).log(), double([advantage])
    tau = 2.0 if advantage > 0 else 3.0
    got = sapo_loss(log_probs, old, a, tau_pos=2.0, tau_neg=3.0)
    # Ratio 2.
    torch.testing.assert_close(got.terms, -a * torch.sigmoid(double([tau])) * 4 / tau)
    # A move up of 0.25 is too far for a range of 0.2 with a positive advantage only.
    for loss in (dppo_tv_loss, dppo_kl_loss):
        far = loss(log_probs, old, a, clip_low=0.1, clip_high=0.1).statistics["pg_clipfrac"]
        assert far.tolist() == [float(advantage > 0)]


def test_the_cap_of_the_dual_clip_acts_on_a_negative_advantage_however_small() -> None:
    # Ratio 4, cap 3.
    got = clipped_policy_loss(
        double([4.0] * 2).log(), double([0.0] * 2), double([0.25, -0.25]), **CLIP, clip_c=3.0
    )
    torch.testing.assert_close(got.terms, double([-0.25 * 1.2, 0.25 * 3]))


def test_what_losses_ask_for_and_declare() -> None:
    clip = {"clip_low", "clip_high"}
    settings = {name: set(policy_loss_declaration(name).settings) for name in POLICY_LOSS_REGISTRY}
    assert settings["vanilla"] == clip | {"clip_c"}
    assert all(settings[name] == clip for name in ("gspo", "gmpo", "cispo", "dppo_tv", "dppo_kl", "clip_cov"))
    assert not any(settings[name] for name in ("sapo", "dro", "gpg", "kl_cov"))
    moves = {name for name in POLICY_LOSS_REGISTRY if policy_loss_declaration(name).moves_without_advantage}
    assert moves == {"dro", "kl_cov"}


def test_a_choice_of_tokens_may_be_made_from_columns_with_a_gradient() -> None:
    columns = {name: COVARIANT[name].clone().requires_grad_() for name in ("log_probs", "advantages")}
    got = select_clip_cov(
        **columns,
        old_log_probs=columns["log_probs"],
        response_mask=COVARIANT["response_mask"],
        **CLIP,
        clip_cov_lb=0.5,
    )
    assert int(got["cov_selected"].sum()) == 1


def test_no_gradient_reaches_a_teacher_or_a_statistic() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, teacher = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    log_probs = policy.requires_grad_().log_softmax(-1)
    teacher_log_probs = teacher.requires_grad_().log_softmax(-1)
    for got in (
        topk_forward_kl(log_probs[..., :2], teacher_log_probs[..., :2], with_tail=True),
        topk_forward_kl(log_probs[..., :2], teacher_log_probs[..., :2]),
        reverse_kl_terms(log_probs, teacher_log_probs),
        reverse_kl_terms(log_probs, teacher_log_probs, kind="k3"),
    ):
        assert not any(values.requires_grad for values in got.statistics.values())
        (by_teacher,) = torch.autograd.grad(got.terms.sum(), teacher, retain_graph=True, allow_unused=True)
        assert by_teacher is None
        (by_policy,) = torch.autograd.grad(got.terms.sum(), policy, retain_graph=True)
        assert by_policy.any()


def test_the_forward_kl_sums_over_the_last_axis_whatever_is_before_it() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs, teacher = (
        torch.randn(2, 3, 4, generator=generator, dtype=torch.float64).log_softmax(-1)[..., :3]
        for _ in range(2)
    )
    got = topk_forward_kl(log_probs, teacher, with_tail=True)
    for row in range(2):
        one = topk_forward_kl(log_probs[row], teacher[row], with_tail=True)
        torch.testing.assert_close(got.terms[row], one.terms)
        for name, values in one.statistics.items():
            torch.testing.assert_close(got.statistics[name][row], values)
    by_hand = (teacher.exp() * (teacher - log_probs)).sum(dim=2)
    torch.testing.assert_close(topk_forward_kl(log_probs, teacher).terms, by_hand)


def test_only_what_is_prepared_is_said_to_be_prepared() -> None:
    with pytest.raises(ValueError, match="needs the columns advantages, cov_selected") as error:
        policy_loss_terms(
            "kl_cov",
            mask=torch.ones(2),
            columns={"log_probs": double([0.0, 0.0]), "old_log_probs": double([0.0, 0.0])},
            settings={},
        )
    assert "; cov_selected is computed once per optimizer batch" in str(error.value)
    with pytest.raises(ValueError, match="but the batch has log_probs, response_mask, row_ids$"):
        policy_loss_terms(
            "vanilla", mask=torch.ones(1, 1), columns={"log_probs": double([[0.0]])}, settings={}
        )


def test_a_loss_sees_zeros_outside_the_mask() -> None:
    mask = torch.tensor([True, False])
    columns = {name: double([-0.5, 7.0]) for name in ("log_probs", "old_log_probs", "advantages")}
    got = policy_loss_terms("gpg", mask=mask, columns=columns, settings={})
    assert got.terms.tolist() == [-0.25, 0.0]

    def as_given(*, advantages: Tensor) -> dict[str, Tensor]:
        return {"seen": advantages}

    declaration = Declaration(needs=frozenset({"seen"}), prepare=as_given, prepared=frozenset({"seen"}))
    columns["advantages"].requires_grad_()
    seen = call_prepare("mine", declaration, mask=mask, columns=columns, settings={})["seen"]
    assert seen.tolist() == [-0.5, 0.0]
    assert not seen.requires_grad


def test_what_a_loss_of_ones_own_returns_is_checked() -> None:
    declaration = Declaration(needs=frozenset({"log_probs"}))
    mask, columns = torch.ones(2), {"log_probs": double([0.0, 0.0])}
    with pytest.raises(
        ValueError, match="'mine' returned a Tensor; a loss that declares its columns returns"
    ):
        call_loss("mine", lambda log_probs: log_probs, declaration, mask=mask, columns=columns, settings={})

    def short_statistic(log_probs: Tensor) -> PolicyLossTerms:
        return PolicyLossTerms(terms=log_probs, statistics={"half": log_probs[:1]})

    with pytest.raises(ValueError, match=r"'mine' returned half of shape \(1,\) for columns of shape \(2,\)"):
        call_loss("mine", short_statistic, declaration, mask=mask, columns=columns, settings={})


@pytest.mark.parametrize("result", [{}, {"seen": torch.zeros(1)}, {"other": torch.zeros(2)}])
def test_what_a_loss_of_ones_own_prepares_is_checked(result: dict[str, Tensor]) -> None:
    def prepare(*, advantages: Tensor) -> dict[str, Tensor]:
        return result

    declaration = Declaration(needs=frozenset({"seen"}), prepare=prepare, prepared=frozenset({"seen"}))
    with pytest.raises(
        ValueError, match=r"prepare of policy loss 'mine' returned .* it must return seen of shape \(2,\)"
    ):
        call_prepare(
            "mine", declaration, mask=torch.ones(2), columns={"advantages": torch.zeros(2)}, settings={}
        )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_probs", [(1e-7, 0.0), (0.0, 1e-7), (1e-7, 1e-7)])
def test_dppo_kl_takes_a_log_prob_just_above_0_for_0(
    log_probs: tuple[float, float], advantage: float
) -> None:
    now, old = torch.tensor([log_probs[0]]), torch.tensor([log_probs[1]])
    got = dppo_kl_loss(now, old, torch.tensor([advantage]), **CLIP)
    assert got.statistics["pg_clipfrac"].tolist() == [0.0]


def test_the_overlap_with_the_teachers_tokens_by_hand() -> None:
    # Teacher 1/2, 1/4, 1/8 against 1/4, 1/4, 1/4 of the policy. p_teacher (log p - log p_teacher):
    # -1/2 ln 2, 0, 1/8 ln 2.
    teacher, policy = double([[0.5, 0.25, 0.125]]).log(), double([[0.25, 0.25, 0.25]]).log().requires_grad_()
    ln2 = math.log(2)
    for likely, share, mean in (
        ([True, True, True], 1.0, (-0.5 + 0.125) * ln2 / 3),
        ([True, False, True], 2 / 3, (-0.5 + 0.125) * ln2 / 2),
        ([False, False, True], 1 / 3, 0.125 * ln2),
        ([False, False, False], 0.0, 0.0),
    ):
        got = topk_forward_kl(policy, teacher, is_likely=torch.tensor([likely]))
        torch.testing.assert_close(got.statistics["overlap_ratio"], double([share]))
        torch.testing.assert_close(got.statistics["overlap_token_advantage"], double([mean]))
        assert not any(values.requires_grad for values in got.statistics.values())
    both = topk_forward_kl(
        policy.expand(2, 3), teacher.expand(2, 3), is_likely=torch.tensor([[True] * 3, [True, False, False]])
    )
    torch.testing.assert_close(both.statistics["overlap_ratio"], double([1.0, 1 / 3]))
    cube = topk_forward_kl(
        policy.expand(2, 2, 3), teacher.expand(2, 2, 3), is_likely=torch.ones(2, 2, 3, dtype=torch.bool)
    )
    assert cube.statistics["overlap_ratio"].tolist() == [[1.0, 1.0]] * 2
    assert cube.statistics["overlap_token_advantage"].shape == (2, 2)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_means_of_no_token_have_the_shape_of_the_columns(shape: tuple[int, ...]) -> None:
    values, rows = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
    assert row_means(values, rows.bool(), rows).shape == shape
