"""Each estimator on a case solved by hand, and each known mistake of implementations as a test of its own."""

from __future__ import annotations

import math

import pytest
import torch
from algorithms.contract.estimators import TRAITS
from torch import Tensor

from strop.algorithms.advantages import estimate_advantages
from strop.algorithms.advantages.group_baselines import (
    gpg_advantages,
    grpo_passk_advantages,
    maxrl_advantages,
    opo_advantages,
)
from strop.algorithms.advantages.optimal_token_baseline import variance_proxies
from strop.algorithms.advantages.prime import process_share
from strop.algorithms.advantages.reinforce_pp import gdpo_advantages
from strop.algorithms.specs import adv_estimator_declaration

EXACT = {"rtol": 0.0, "atol": 1e-12}
GROUP_RELATIVE = sorted(name for name in TRAITS if TRAITS[name].compares_groups)
WHITENED = ("gae", "gdpo", "prime", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(
    name: str,
    token_rewards: Tensor,
    groups: list[int],
    mask: Tensor,
    settings: dict[str, object] | None = None,
    **columns: Tensor,
) -> Tensor:
    """Advantages; columns that are not given are 0 (values, baselines) or those of a fair coin (log-probs)."""
    shape = token_rewards.shape
    totals = token_rewards.sum(dim=-1)
    return estimate_advantages(
        name,
        token_level_rewards=token_rewards,
        response_mask=mask,
        group_ids=torch.tensor(groups),
        settings=settings or {},
        columns={
            "values": torch.zeros(shape, dtype=torch.float64),
            "reward_baselines": torch.zeros(shape[0], dtype=torch.float64),
            "reward_parts": totals[:, None],
            "process_rewards": torch.zeros(shape, dtype=torch.float64),
            "old_log_probs": torch.full(shape, math.log(0.5), dtype=torch.float64),
            "sum_pi_squared": torch.full(shape, 0.5, dtype=torch.float64),
            **episodes_of_one_answer(totals),
            **columns,
        },
    )[0]


def episodes_of_one_answer(totals: Tensor) -> dict[str, Tensor]:
    """Columns of steps: every row is an episode, and all are in the same state."""
    zero = torch.zeros(len(totals), dtype=torch.int64)
    samples = torch.arange(len(totals))
    return {"turn_rewards": totals, "sample_index": samples, "turn_index": zero, "anchor_ids": zero}


def one_token(rewards: list[float]) -> tuple[Tensor, Tensor]:
    """Token rewards and mask of responses of one sampled token."""
    return double(rewards)[:, None], torch.ones(len(rewards), 1, dtype=torch.bool)


def test_dr_grpo_is_the_centered_reward() -> None:
    # Mean of 0, 1, 5 is 2.
    rewards, mask = one_token([0.0, 1.0, 5.0])
    torch.testing.assert_close(
        run("dr_grpo", rewards, [4, 4, 4], mask), double([[-2.0], [-1.0], [3.0]]), **EXACT
    )


def test_grpo_passk_rewards_the_lead_of_the_best() -> None:
    # Rewards 1, 3, 7: mean 11/3, squared deviations (64 + 4 + 100) / 9 = 56/3, sample std sqrt(28/3); lead 7 - 3.
    # The second group's best two are equal: no lead. A group of one: 0.
    rewards = double([1.0, 3.0, 7.0, 2.0, 2.0, 0.0, 9.0])
    groups, mask = torch.tensor([0, 0, 0, 1, 1, 1, 2]), torch.ones(7, 1)
    lead = double([[0.0], [0.0], [4.0], [0.0], [0.0], [0.0], [0.0]])
    got = grpo_passk_advantages(rewards, groups, mask, norm_by_std=False)
    torch.testing.assert_close(got, lead, **EXACT)
    got = grpo_passk_advantages(rewards, groups, mask)
    torch.testing.assert_close(got, lead / (math.sqrt(28 / 3) + 1e-6), **EXACT)


def test_opo_weighs_the_baseline_by_length() -> None:
    # Reward 1 with three tokens, 4 with one: baseline (3*1 + 1*4) / 4 = 7/4. A lone sample: 0.
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0]])
    got = opo_advantages(double([1.0, 4.0, 6.0]), torch.tensor([2, 2, 5]), mask)
    expected = double([[-0.75, -0.75, 0, -0.75], [0, 2.25, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(got, expected, **EXACT)


def test_gpg_makes_up_for_samples_that_teach_nothing() -> None:
    # Centered: +-1/2, 0, 0, 0. Rewards that are not 0: four of five, alpha 5/4. Samples of mixed groups: two of
    # five, alpha 5/2.
    rewards, groups, mask = double([1.0, 0.0, 1.0, 1.0, 5.0]), torch.tensor([0, 0, 1, 1, 2]), torch.ones(5, 1)
    unit = double([[0.5], [-0.5], [0.0], [0.0], [0.0]])
    torch.testing.assert_close(gpg_advantages(rewards, groups, mask), unit * 1.25, **EXACT)
    got = gpg_advantages(rewards, groups, mask, f_norm=0.5, count_mixed_groups=True)
    torch.testing.assert_close(got, unit * 2.5 / 0.5, **EXACT)
    # A KL penalty that is rounding makes no reward of none, and no group mixed.
    rounded = double([1.0, 1e-17, 1.0, 1.0 + 3e-16, 5.0])
    torch.testing.assert_close(gpg_advantages(rounded, groups, mask), unit * 1.25, **EXACT)
    got = gpg_advantages(rounded, groups, mask, f_norm=0.5, count_mixed_groups=True)
    torch.testing.assert_close(got, unit * 2.5 / 0.5, **EXACT)
    # Nothing is counted: the divisor is 1, and all advantages are 0.
    assert gpg_advantages(double([0.0, 0.0]), torch.tensor([0, 0]), torch.ones(2, 1)).abs().max().item() == 0
    with pytest.raises(ValueError, match=r"f_norm is 0.0, but it divides the rewards: use a number above 0"):
        gpg_advantages(rewards, groups, mask, f_norm=0.0)


def test_maxrl_divides_by_the_mean() -> None:
    # One of four solved: mean 1/4, so (1 - 1/4) / (1/4) = 3 and -1. All, none, or one sample: 0.
    rewards = double([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 5.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3])
    got = maxrl_advantages(rewards, groups, torch.ones(9, 1))
    torch.testing.assert_close(got[:, 0], double([3.0, -1.0, -1.0, -1.0, 0, 0, 0, 0, 0]), **EXACT)
    with pytest.raises(
        ValueError, match=r"rewards of at least 0, but those of rows \[1\] are negative \(lowest -0.5"
    ):
        maxrl_advantages(double([1.0, -0.5]), torch.tensor([0, 0]), torch.ones(2, 1))


def test_reinforce_plus_plus_baseline_whitens_over_tokens() -> None:
    # Centered -1/2 on three tokens and +1/2 on one: mean -1/4; squared deviations 3/16 + 9/16 = 3/4, over 3: 1/4.
    # The lone sample of the other prompt is in neither mean nor variance.
    scale = 1 / math.sqrt(0.25 + 1e-8)
    mask = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 1, 0]])
    rewards = double([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 9.0, 0.0]])
    got = run("reinforce_plus_plus_baseline", rewards, [0, 0, 1], mask)
    a, b = -0.25 * scale, 0.75 * scale
    torch.testing.assert_close(got, double([[a, a, a], [0, b, 0], [0, 0, 0]]), **EXACT)


def test_gdpo_normalizes_each_part_before_it_adds() -> None:
    # Part one is 1 and 0, part two 0 and 100. Normalized, they are +-d: with equal weights nothing is left, where
    # the sum of the raw parts would prefer the second sample. With weights 2 and 1 the first is better.
    parts, groups, mask = double([[1.0, 0.0], [0.0, 100.0]]), torch.tensor([0, 0]), torch.ones(2, 1)
    first, second = 0.5 / (math.sqrt(0.5) + 1e-6), 50 / (math.sqrt(5000) + 1e-6)
    got = gdpo_advantages(parts, groups, mask, reward_weights=(2.0, 1.0))
    total = 2 * first - second
    expected = total / math.sqrt(2 * total**2 + 1e-8)
    torch.testing.assert_close(got, double([[expected], [-expected]]), **EXACT)
    assert gdpo_advantages(parts, groups, mask).abs().max().item() < 0.05
    with pytest.raises(ValueError, match="reward_weights has 1 numbers for 2 parts of the reward"):
        gdpo_advantages(parts, groups, mask, reward_weights=(1.0,))


def gigpo(settings: dict[str, object], **changed: list[int]) -> Tensor:
    """Two episodes of a prompt: rewards 0, 1 and 0, 0, 3; the second answers of both were given in state 7, where the
    second episode was at its third answer again."""
    columns = {
        "sample_index": [0, 0, 1, 1, 1], "turn_index": [0, 1, 0, 1, 2], "anchor_ids": [5, 7, 5, 7, 7], **changed,
    }  # fmt: skip
    rewards, mask = one_token([0.0, 1.0, 0.0, 0.0, 3.0])
    return run(
        "gigpo", rewards, [4] * 5, mask, settings, turn_rewards=rewards[:, 0],
        **{name: torch.tensor(numbers) for name, numbers in columns.items()},
    )[:, 0]  # fmt: skip


def test_gigpo_compares_episodes_and_answers_in_the_same_state() -> None:
    # Episodes are worth 1 and 3: -1 and 1 around their mean of 2, each once, however many answers it has.
    # To go with a discount of 1/2: 0.5, 1 and 0.75, 1.5, 3. State 5: 0.5 and 0.75 around 0.625. State 7: 1, 1.5 and
    # 3 around 11/6.
    plain: dict[str, object] = {"norm_by_std": False, "gamma": 0.5, "step_weight": 2.0}
    steps = double([-0.125, 1 - 11 / 6, 0.125, 1.5 - 11 / 6, 3 - 11 / 6])
    torch.testing.assert_close(gigpo(plain), double([-1.0, -1, 1, 1, 1]) + 2 * steps, **EXACT)
    # By the standard deviations: of 1 and 3 sqrt(2), of state 5 sqrt(1/32), of state 7
    # sqrt(((5/6)^2 + (1/3)^2 + (7/6)^2) / 2) = sqrt(13/12), each and 1e-6.
    deviation = double([1 / 32, 13 / 12, 1 / 32, 13 / 12, 13 / 12]).sqrt() + 1e-6
    expected = double([-1.0, -1, 1, 1, 1]) / (math.sqrt(2) + 1e-6) + steps / deviation
    torch.testing.assert_close(gigpo({"gamma": 0.5}), expected, **EXACT)


def test_a_state_of_one_answer_or_of_no_name_leaves_gigpo_the_episodes() -> None:
    plain: dict[str, object] = {"norm_by_std": False}
    for alone in ([1, 2, 3, 4, 5], [-1] * 5):
        torch.testing.assert_close(gigpo(plain, anchor_ids=alone), double([-1.0, -1, 1, 1, 1]), **EXACT)
    # An answer that stands in the batch twice, as one of a rank does that is filled up, counts once in its episode.
    twice = gigpo(plain, sample_index=[0, 1, 1, 1, 1], turn_index=[0, 0, 0, 1, 2], anchor_ids=[-1] * 5)
    torch.testing.assert_close(twice, double([-1.5, 1.5, 1.5, 1.5, 1.5]), **EXACT)


def test_remax_subtracts_the_greedy_reward_from_each_token() -> None:
    # Rewards 1, 0, 2 to go: 3, 2, 2. The second row's reward sits on a given token after its one sampled token.
    got = run(
        "remax",
        double([[1.0, 0.0, 2.0], [0.0, 5.0, 0.0]]),
        [0, 1],
        torch.tensor([[1, 1, 1], [1, 0, 0]]),
        reward_baselines=double([2.0, 0.5]),
    )
    torch.testing.assert_close(got, double([[1.0, 0.0, 0.0], [4.5, 0.0, 0.0]]), **EXACT)


# Two samples of one prompt. Row 0: each token has pi = 1/2, sum pi^2 = 1/2, so w = 1 - 1 + 1/2 = 1/2; W = 1/2, 1.
# Row 1: pi = 1/4, sum pi^2 = 1/2, so w = 1 - 1/2 + 1/2 = 1 and W = 1, 2. Returns: 3, 3 and 0, 0. Baselines:
# 3 (1/2) / (1/2 + 1) = 1 and 3 * 1 / (1 + 2) = 1.
COIN, QUARTER = math.log(0.5), math.log(0.25)


def token_baseline(
    name: str, mask: list[list[int]], settings: dict[str, object] | None = None, **columns: Tensor
) -> Tensor:
    width = len(mask[0])
    rewards = torch.zeros(2, width, dtype=torch.float64)
    rewards[0, -1] = 3.0
    return run(
        name,
        rewards,
        [0, 0],
        torch.tensor(mask),
        settings,
        old_log_probs=double([[COIN] * width, [QUARTER] * width]),
        **columns,
    )


def test_the_token_baseline_weighs_returns_by_gradient_energy() -> None:
    got = token_baseline("optimal_token_baseline", [[1, 1], [1, 1]])
    torch.testing.assert_close(got, double([[2.0, 2.0], [-1.0, -1.0]]), **EXACT)


def test_the_token_baseline_squares_importance_weights() -> None:
    # Weight 2 on the first token of row 0: w = 2, W = 2, 5/2; baselines 3*2/3 = 2 and 3 (5/2) / (9/2) = 5/3.
    weights = double([[2.0, 1.0], [1.0, 1.0]])
    got = token_baseline("optimal_token_baseline", [[1, 1], [1, 1]], rollout_is_weights=weights)
    torch.testing.assert_close(got, double([[1.0, 4 / 3], [-2.0, -5 / 3]]), **EXACT)


def test_the_variance_of_gradients_is_estimated_from_samples() -> None:
    # w is 1/2 per token of row 0 and 1 per token of row 1, so W = 1 and 2; A = (2 + 4) / 2 = 3 and (-1 - 3) / 2 = -2.
    # Row 2 has no sampled token. A weight of 2 on the first token of row 0 makes its mean 3/2, the weighted W 2 + 1/2.
    batch = {
        "advantages": double([[2.0, 4.0, 99.0], [-1.0, 99.0, -3.0], [99.0, 99.0, 99.0]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]),
        "old_log_probs": double([[COIN] * 3, [QUARTER] * 3, [COIN] * 3]),
        "sum_pi_squared": torch.full((3, 3), 0.5, dtype=torch.float64),
    }
    measured = variance_proxies(batch, {})
    assert measured == pytest.approx({
        "variance_proxy/proxy2_total_power": (9 * 1 + 4 * 2) / 2,
        "variance_proxy/expected_a_squared": (9 + 4) / 2,
        "variance_proxy/expected_w": (1 + 2) / 2,
    })  # fmt: skip
    weights = double([[2.0, 1.0, 9.0], [1.0, 9.0, 1.0], [9.0, 9.0, 9.0]])
    weighted = variance_proxies({**batch, "rollout_is_weights": weights}, {})
    assert weighted == pytest.approx({
        "variance_proxy/proxy2_total_power": (1.5**2 * 9 * 1 + 4 * 2) / 2,
        "variance_proxy/expected_a_squared": (9 + 4) / 2,
        "variance_proxy/expected_w": (2.5 + 2) / 2,
    })  # fmt: skip
    assert variance_proxies({**batch, "response_mask": torch.zeros(3, 3)}, {}) == {}


def test_tools_shift_columns_but_not_sampled_tokens() -> None:
    # The second sampled tokens are in columns 2 and 1: without peers by column, peers by count.
    mask = [[1, 0, 1], [1, 1, 0]]
    got = token_baseline("tir_optimal_token_baseline", mask)
    torch.testing.assert_close(got, double([[2.0, 0.0, 2.0], [-1.0, -1.0, 0.0]]), **EXACT)
    got = token_baseline("optimal_token_baseline", mask)
    torch.testing.assert_close(got, double([[2.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]), **EXACT)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_tail_of_the_longest_sample_has_no_baseline(name: str) -> None:
    # Tokens 2 and 3 of row 0 have no peer: advantage 0, or the whole return of 3 where that is asked for.
    mask = [[1, 1, 1, 1], [1, 1, 0, 0]]
    got = token_baseline(name, mask)
    torch.testing.assert_close(got, double([[2.0, 2.0, 0.0, 0.0], [-1.0, -1.0, 0.0, 0.0]]), **EXACT)
    got = token_baseline(name, mask, {"handle_zero_tail": True})
    torch.testing.assert_close(got, double([[2.0, 2.0, 3.0, 3.0], [-1.0, -1.0, 0.0, 0.0]]), **EXACT)


def test_certain_tokens_fall_back_to_the_plain_mean() -> None:
    # pi = 1 and sum pi^2 = 1 (rounded to just below): no gradient, no weight, baseline (3 + 0) / 2.
    certain = {"old_log_probs": torch.zeros(2, 1, dtype=torch.float64)}
    rewards, mask = one_token([3.0, 0.0])
    got = run(
        "optimal_token_baseline", rewards, [0, 0], mask, sum_pi_squared=double([[1 - 1e-9]] * 2), **certain
    )
    torch.testing.assert_close(got, double([[1.5], [-1.5]]), **EXACT)


@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized", "grpo", "grpo_vectorized", "dr_grpo"])
def test_defect_a4_aliases_agree_on_a_group_of_one(name: str) -> None:
    rewards, mask = one_token([5.0, 0.0, 1.0])
    got = run(name, rewards, [9, 4, 4], mask)
    assert got[0].item() == 0
    assert got[1].item() < 0 < got[2].item()


@pytest.mark.parametrize("size", [7, 8, 16])
@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_defect_a5_equal_rewards_give_exactly_zero(name: str, size: int) -> None:
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((size, 1), 0.1, dtype=dtype)
        got = run(name, rewards, [1] * size, torch.ones(size, 1))
        assert got.abs().max().item() == 0
        assert got.dtype == dtype


@pytest.mark.parametrize("name", sorted(TRAITS))
def test_defect_a6_a_reward_on_a_given_token_counts(name: str) -> None:
    # The reward of row 0 sits on a tool's reply, after the last sampled token.
    mask, groups = torch.tensor([[1, 1, 0], [1, 1, 0]]), [1, 1]
    on_given = run(name, double([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), groups, mask)
    on_sampled = run(name, double([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), groups, mask)
    assert on_given[0, 1].item() > 0
    torch.testing.assert_close(on_given, on_sampled, **EXACT)


@pytest.mark.parametrize("name", WHITENED)
def test_defect_a7_one_valid_token_has_no_advantage(name: str) -> None:
    mask = torch.tensor([[0, 1], [0, 0]])
    advantages = run(name, double([[0.0, 1.0], [0.0, 0.0]]), [0, 0], mask)
    assert advantages.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_defect_a8_passk_gives_a_group_of_one_zero() -> None:
    rewards, mask = one_token([3.0, 0.0, 1.0])
    got = run("grpo_passk", rewards, [9, 4, 4], mask, {"norm_by_std": False})
    torch.testing.assert_close(got, double([[0.0], [0.0], [1.0]]), **EXACT)


@pytest.mark.parametrize("name", sorted(TRAITS))
def test_rewards_that_are_nan_are_refused_by_every_estimator(name: str) -> None:
    rewards, mask = one_token([0.0, math.nan])
    with pytest.raises(ValueError, match=r"rewards must be finite, but those of rows \[1\]"):
        run(name, rewards, [0, 0], mask)


@pytest.mark.parametrize(
    ("column", "value"),
    [("old_log_probs", math.nan), ("sum_pi_squared", math.inf), ("rollout_is_weights", math.nan)],
)
def test_the_token_baseline_refuses_numbers_that_are_not_finite_inside_the_mask_only(
    column: str, value: float
) -> None:
    rewards, mask = double([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[1, 0], [1, 1]])
    bad = torch.full((2, 2), 0.5, dtype=torch.float64)
    bad[0, 1] = value
    assert torch.isfinite(run("optimal_token_baseline", rewards, [0, 0], mask, **{column: bad})).all()
    bad[1, 1] = value
    with pytest.raises(ValueError, match=rf"{column} must be finite, but those of rows \[1\]"):
        run("optimal_token_baseline", rewards, [0, 0], mask, **{column: bad})


def test_group_relative_is_declared_as_claimed() -> None:
    for name, traits in TRAITS.items():
        assert adv_estimator_declaration(name).is_group_relative == traits.compares_groups, name


def prime(process: object, groups: list[int], settings: dict[str, object] | None = None) -> Tensor:
    rewards = double([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    return run("prime", rewards, groups, mask, settings, process_rewards=double(process))


def test_prime_compares_tokens_with_the_mean_of_the_other_sample() -> None:
    # Means over sampled tokens: 0.3 and 0.2. Less the other's: [0, 0.2] and [-0.4, 0.2, -0.1], summed from behind at
    # half weight per token: [0.1, 0.2] and [-0.325, 0.15, -0.1]. Outcomes 1 and 0: +1 and -1.
    process = [[0.2, 0.4, 9.0], [-0.1, 0.5, 0.2]]
    plain = {"gamma": 0.5, "process_norm": False, "whiten": False}
    got = prime(process, [0, 0], plain)
    torch.testing.assert_close(got, double([[1.1, 1.2, 0.0], [-1.325, -0.85, -1.1]]), **EXACT)
    got = prime(process, [0, 0], {**plain, "process_weight": 10.0, "outcome_weight": 0.0})
    torch.testing.assert_close(got, double([[1.0, 2.0, 0.0], [-3.25, 1.5, -1.0]]), **EXACT)


def test_prime_divides_process_rewards_by_the_largest_that_is_still_to_come() -> None:
    # Sums to the end, undiscounted: 0.6, 0.4; 0.6, 0.7, 0.2. So the process parts above are divided by 0.7 (+ 1e-6).
    process = [[0.2, 0.4, 9.0], [-0.1, 0.5, 0.2]]
    got = prime(process, [0, 0], {"gamma": 0.5, "whiten": False})
    wanted = [[1 + 1 / 7, 1 + 2 / 7, 0.0], [-1 - 0.325 / 0.7, -1 + 0.15 / 0.7, -1 - 1 / 7]]
    torch.testing.assert_close(got, double(wanted), rtol=0, atol=1e-6)
    # So the units of process rewards do not matter, until they are as small as 1e-6.
    larger = prime([[1e4 * p for p in row] for row in process], [0, 0], {"gamma": 0.5, "whiten": False})
    torch.testing.assert_close(larger, got, rtol=0, atol=1e-5)
    smaller = prime([[1e-9 * p for p in row] for row in process], [0, 0], {"gamma": 0.5, "whiten": False})
    torch.testing.assert_close(smaller, double([[1, 1, 0], [-1, -1, -1]]), rtol=0, atol=1e-3)


def test_prime_whitens_over_the_tokens_of_samples_with_peers() -> None:
    # Means 0.3 and 0.2; less the other's [0, 0.2] and [-0.3, 0.1]; to come [0.2, 0.2] and [-0.2, 0.1]; with the
    # outcomes [1.2, 1.2] and [-1.2, -0.9]: mean 0.075, squares of what is left 5.1075 in sum, a third of it 1.7025. The
    # third sample has no peer.
    got = run(
        "prime", double([[0.0, 1.0], [0.0, 0.0], [0.0, 5.0]]), [0, 0, 1], torch.ones(3, 2).bool(),
        {"process_norm": False}, process_rewards=double([[0.2, 0.4], [0.0, 0.4], [7.0, 7.0]]),
    )  # fmt: skip
    wanted = double([[1.125, 1.125], [-1.275, -0.975], [0.0, 0.0]]) / math.sqrt(1.7025)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-8)


def test_how_much_of_the_advantages_process_rewards_make() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    process = double([[0.3, -0.1, 9.0], [0.0, 9.0, 9.0]])  # squares 0.09 + 0.01 + 0
    outcome = double([[1.0, 1.0, 9.0], [-1.0, 9.0, 9.0]])  # squares 3
    assert process_share(process, outcome, mask) == pytest.approx(0.1 / 3.1)
    assert process_share(process, 0 * outcome, mask) == 1.0
    assert process_share(0 * process, 0 * outcome, mask) == 0.0


def test_prime_has_nothing_to_compare_a_lone_sample_with() -> None:
    assert prime([[0.2, 0.4, 9.0], [-0.1, 0.5, 0.2]], [0, 1]).abs().max() == 0


def test_prime_compares_with_samples_that_have_a_token() -> None:
    # The third sample has none: it is no part of the mean. Against 0.2 of the second alone: 0.3 - 0.2.
    mask = torch.tensor([[1], [1], [0]]).bool()
    process = double([[0.3], [0.2], [7.0]])
    plain = {"process_norm": False, "whiten": False}
    got = run("prime", double([[0.0]] * 3), [0, 0, 0], mask, plain, process_rewards=process)
    torch.testing.assert_close(got, double([[0.1], [-0.1], [0.0]]), **EXACT)


def test_prime_refuses_process_rewards_that_are_not_finite_inside_the_mask_only() -> None:
    assert torch.isfinite(prime([[0.0, 0.0, math.nan], [0.0, 0.0, 0.0]], [0, 0])).all()
    with pytest.raises(ValueError, match=r"process_rewards must be finite, but those of rows \[1\]"):
        prime([[0.0, 0.0, 0.0], [0.0, math.inf, 0.0]], [0, 0])
