from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import advantages as reference
from strop.algorithms.advantages import (
    ADV_ESTIMATOR_REGISTRY,
    adv_estimator_columns,
    estimate_advantages,
    get_adv_estimator_fn,
    group_ids_of,
    register_adv_est,
)
from strop.algorithms.advantages.group_baselines import rloo_advantages
from strop.algorithms.advantages.group_relative import grpo_advantages
from strop.algorithms.advantages.reward_to_go import reward_to_go
from strop.algorithms.specs import adv_estimator_declaration, check_adv_settings, check_estimator

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus")


@pytest.fixture
def scratch_registry() -> Iterator[None]:
    before = dict(ADV_ESTIMATOR_REGISTRY)
    declared = dict(ADV_ESTIMATOR_REGISTRY.declarations)
    yield
    ADV_ESTIMATOR_REGISTRY.clear()
    ADV_ESTIMATOR_REGISTRY.update(before)
    ADV_ESTIMATOR_REGISTRY.declarations.clear()
    ADV_ESTIMATOR_REGISTRY.declarations.update(declared)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[list[int]]]:
    """Token rewards, groups and masks of a few rows; at least two tokens are valid."""
    num_rows, width = draw(st.integers(2, 7)), draw(st.integers(1, 4))
    reward = st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0, 3.25])
    rewards = [[draw(reward) for _ in range(width)] for _ in range(num_rows)]
    groups = [draw(st.integers(3, 6)) for _ in range(num_rows)]
    mask = [[1] + [draw(st.integers(0, 1)) for _ in range(width - 1)] for _ in range(num_rows)]
    return rewards, groups, mask


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def estimate(name: str, rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    return estimate_advantages(
        name, token_level_rewards=rewards, response_mask=mask, group_ids=groups, settings={}
    )[0]


def test_grpo_advantages_on_two_groups() -> None:
    # Rewards 0 and 1: mean 1/2, sample std 1/sqrt(2), so A = -+(1/2)/(1/sqrt(2) + eps). A group of one: 0.
    a = 0.5 / (0.5**0.5 + 1e-6)
    rewards, group_ids = double([0.0, 1.0, 5.0]), torch.tensor([3, 3, 7])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    expected = double([[-a, -a, 0.0], [a, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(grpo_advantages(rewards, group_ids, mask), expected, rtol=0, atol=1e-12)


def test_grpo_without_std_is_the_centered_reward() -> None:
    # Mean of 0, 1, 5 is 2.
    rewards, group_ids, mask = double([0.0, 1.0, 5.0]), torch.zeros(3, dtype=torch.int64), torch.ones(3, 1)
    expected = double([[-2.0], [-1.0], [3.0]])
    torch.testing.assert_close(grpo_advantages(rewards, group_ids, mask, norm_by_std=False), expected)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # Others of 0: (1+5)/2 = 3; of 1: 5/2; of 5: 1/2.
    rewards, group_ids, mask = double([0.0, 1.0, 5.0]), torch.zeros(3, dtype=torch.int64), torch.ones(3, 1)
    torch.testing.assert_close(rloo_advantages(rewards, group_ids, mask), double([[-3.0], [-1.5], [4.5]]))


def test_reward_to_go_discounts_sampled_tokens_only() -> None:
    # Tokens: sampled, given (reward 4), sampled (reward 2); gamma 1/2. G_2 = 2. The 4 belongs to token 0:
    # G_0 = 1 + 4 + 2/2 = 6.
    rewards, mask = double([[1.0, 4.0, 2.0]]), torch.tensor([[1, 0, 1]])
    torch.testing.assert_close(reward_to_go(rewards, mask, gamma=0.5), double([[6.0, 0.0, 2.0]]))


@given(batch=batches())
@settings(max_examples=60, deadline=None)
def test_estimators_equal_the_reference(batch: tuple[list[list[float]], list[int], list[list[int]]]) -> None:
    rewards, groups, mask = batch
    totals = [math.fsum(row) for row in rewards]
    args = double(totals), torch.tensor(groups), torch.tensor(mask)
    exact = {"rtol": 0.0, "atol": 1e-10}
    for norm in (True, False):
        expected = double(reference.grpo(totals, groups, mask, norm))
        torch.testing.assert_close(grpo_advantages(*args, norm_by_std=norm), expected, **exact)
    torch.testing.assert_close(rloo_advantages(*args), double(reference.rloo(totals, groups, mask)), **exact)
    returns = reference.reward_to_go(rewards, mask, 0.9)
    got = reward_to_go(double(rewards), args[2], gamma=0.9)
    torch.testing.assert_close(got, double(returns), **exact)
    if max(map(max, rewards)) > min(map(min, rewards)):
        whitened, plain = get_adv_estimator_fn("reinforce_plus_plus")(
            token_level_rewards=double(rewards), response_mask=args[2], gamma=0.9
        )
        torch.testing.assert_close(plain, double(returns), **exact)
        # Returns that should be equal differ by rounding, and a variance near 0 magnifies that.
        torch.testing.assert_close(whitened, double(reference.whiten(returns, mask)), rtol=0, atol=1e-9)


@given(batch=batches(), offset=st.sampled_from([-3.0, 0.25, 1000.0]))
@settings(max_examples=40, deadline=None)
def test_a_constant_added_to_a_group_changes_nothing(
    batch: tuple[list[list[float]], list[int], list[list[int]]], offset: float
) -> None:
    rewards, groups, mask = (torch.tensor(part) for part in batch)
    rewards = (rewards.double() * 8).round() / 8  # eighths stay exact when the offset is added
    moved = rewards.clone()
    moved[groups == groups[0], 0] += offset
    for name in ("grpo", "rloo"):
        before, after = estimate(name, rewards, groups, mask), estimate(name, moved, groups, mask)
        torch.testing.assert_close(after, before, rtol=0, atol=1e-10)


@given(batch=batches(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_permuting_rows_permutes_advantages(
    batch: tuple[list[list[float]], list[int], list[list[int]]], data: st.DataObject
) -> None:
    rewards, groups, mask = (torch.tensor(part) for part in batch)
    rewards = rewards.double()
    order = torch.tensor(data.draw(st.permutations(range(len(groups)))))
    for name in ESTIMATORS:
        plain = estimate(name, rewards, groups, mask)
        permuted = estimate(name, rewards[order], groups[order], mask[order])
        torch.testing.assert_close(permuted, plain[order], rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 7, 8, 16, 33])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(size: int, reward: float, dtype: torch.dtype) -> None:
    # The float mean of eight rewards of 0.1 is not 0.1; the rest, divided by eps, would be an advantage.
    rewards = torch.full((size, 1), reward, dtype=dtype)
    groups, mask = torch.zeros(size, dtype=torch.int64), torch.ones(size, 1)
    for name in ESTIMATORS:
        assert estimate(name, rewards, groups, mask).abs().max().item() == 0.0, name


def test_a_group_of_one_has_no_advantage_under_any_group_estimator() -> None:
    # Without the rule, a lone score of 5 is an advantage of 5 under RLOO's formula and 0 under GRPO's.
    rewards, groups, mask = double([[5.0], [0.0], [1.0]]), torch.tensor([9, 4, 4]), torch.ones(3, 1)
    for name in ("grpo", "rloo"):
        advantages = estimate(name, rewards, groups, mask)
        assert advantages[0].item() == 0.0
        assert advantages[1].item() < 0 < advantages[2].item()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_reward_on_a_given_token_counts_in_every_estimator(name: str) -> None:
    # The reward of row 0 sits on a tool's reply, after the last sampled token.
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    on_given = estimate(name, double([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), torch.tensor([1, 1]), mask)
    on_sampled = estimate(name, double([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([1, 1]), mask)
    assert on_given[0, 0].item() > 0
    torch.testing.assert_close(on_given, on_sampled)


def test_one_token_alone_whitens_to_zero() -> None:
    found = estimate("reinforce_plus_plus", double([[1.0]]), torch.tensor([0]), torch.tensor([[1]]))
    assert found.tolist() == [[0.0]]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=r"rewards must be finite, but those of rows \[1\]"):
        estimate(name, double([[0.0], [bad]]), torch.tensor([0, 0]), torch.ones(2, 1))


def test_whole_number_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="rewards have dtype torch.int64"):
        grpo_advantages(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.ones(2, 1))


def test_advantages_keep_the_dtype_of_rewards() -> None:
    advantages = grpo_advantages(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), torch.ones(2, 1))
    assert advantages.dtype == torch.float32
    expected = torch.tensor([[-(0.5**0.5)], [0.5**0.5]])
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=0)


def test_group_ids_count_up_in_order_of_appearance() -> None:
    assert group_ids_of(["b", "a", "b", "c"]).tolist() == [0, 1, 0, 2]


def test_settings_reach_the_estimator() -> None:
    rewards, groups, mask = double([[0.0], [1.0]]), torch.tensor([0, 0]), torch.ones(2, 1)
    advantages, returns = estimate_advantages(
        "grpo",
        token_level_rewards=rewards,
        response_mask=mask,
        group_ids=groups,
        settings={"norm_by_std": False, "gamma": 0.5},
    )
    torch.testing.assert_close(advantages, double([[-0.5], [0.5]]))
    torch.testing.assert_close(returns, advantages)


def test_one_sample_per_prompt_names_the_alternatives() -> None:
    with pytest.raises(
        ValueError, match=r"to at least 2, or .* without groups \(gae, raft, reinforce_plus_plus, remax"
    ):
        check_estimator("grpo", samples_per_prompt=1)
    check_estimator("grpo", samples_per_prompt=2)
    check_estimator("reinforce_plus_plus", samples_per_prompt=1)


def test_a_switch_the_estimator_does_not_have_is_refused() -> None:
    with pytest.raises(
        ValueError, match="adv_estimator=rloo has no such setting: remove it, or use gigpo or grpo"
    ):
        check_estimator("rloo", samples_per_prompt=4, norm_by_std=False)
    check_estimator("grpo", samples_per_prompt=4, norm_by_std=False)


def test_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown advantage estimator 'GRPO'; known: dr_grpo, gae, gdpo, "):
        get_adv_estimator_fn("GRPO")
    with pytest.raises(ValueError, match="unknown advantage estimator 'nope'"):
        adv_estimator_declaration("nope")


@pytest.mark.usefixtures("scratch_registry")
def test_registering_twice() -> None:
    class Name(Enum):
        MINE = "mine"

    def mine(*, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return rewards[:, None] - values, rewards[:, None].expand_as(values)

    def other() -> tuple[Tensor, Tensor]:
        raise AssertionError("never called")

    assert register_adv_est(Name.MINE, needs=["rewards", "values"])(mine) is mine
    register_adv_est("mine", needs=["rewards", "values"])(mine)
    assert get_adv_estimator_fn(Name.MINE) is mine
    assert adv_estimator_declaration("mine").needs == {"rewards", "values"}
    with pytest.raises(ValueError, match="'mine' is already registered by .*mine: choose another name"):
        register_adv_est("mine")(other)

    call = {
        "token_level_rewards": double([[1.0, 2.0]]),
        "response_mask": torch.ones(1, 2),
        "group_ids": torch.tensor([0]),
    }
    advantages, _ = estimate_advantages("mine", settings={}, columns={"values": double([[1.0, 0.0]])}, **call)
    torch.testing.assert_close(advantages, double([[2.0, 3.0]]))
    with pytest.raises(ValueError, match="'mine' needs the columns values, but the batch has group_ids"):
        estimate_advantages("mine", settings={}, **call)


@pytest.mark.usefixtures("scratch_registry")
def test_an_estimator_without_a_declaration_is_called_in_the_convention_of_verl() -> None:
    seen: dict[str, object] = {}

    @register_adv_est("bare")
    def bare(  # type: ignore[no-untyped-def]
        token_level_rewards, response_mask, config=None, index=None, **kwargs
    ):
        seen.update(config=config, index=list(index), **kwargs)
        scores = token_level_rewards.sum(-1, keepdim=True) * config.gamma * config["bonus"]
        return scores * response_mask, scores * response_mask

    advantages, returns = estimate_advantages(
        "bare",
        token_level_rewards=double([[1.0, 2.0], [0.0, 4.0]]),
        response_mask=torch.tensor([[1, 0], [1, 1]]),
        group_ids=torch.tensor([3, 4]),
        settings={"gamma": 0.5, "bonus": 10.0},
        columns={"reward_baselines": double([1.0, 1.0])},
        uids=["a", "b"],
    )
    torch.testing.assert_close(advantages, double([[15.0, 0.0], [20.0, 20.0]]))
    torch.testing.assert_close(returns, advantages)
    assert seen["index"] == ["a", "b"]
    assert seen["config"].norm_adv_by_std_in_grpo is True  # type: ignore[attr-defined]
    torch.testing.assert_close(seen["reward_baselines"], double([1.0, 1.0]))


@pytest.mark.usefixtures("scratch_registry")
def test_a_result_of_another_shape_names_the_function_and_the_shape() -> None:
    @register_adv_est("narrow", needs=["rewards", "response_mask"])
    def narrow(*, rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        return rewards, rewards

    @register_adv_est("single", needs=["rewards"])
    def single(*, rewards: Tensor) -> Tensor:
        return rewards

    args = double([[1.0, 2.0]]), torch.tensor([0]), torch.ones(1, 2)
    with pytest.raises(
        ValueError, match=r"'narrow' returned a tensor of shape \(1,\) as advantages: .*\[1, 2\]"
    ):
        estimate("narrow", *args)
    with pytest.raises(
        ValueError, match=r"'single' returned a tensor of shape \(1,\): return \(advantages, ret"
    ):
        estimate("single", *args)


def test_settings_of_an_estimator_are_checked_against_its_keyword_defaults() -> None:
    check_adv_settings("gpg", {"f_norm": 2.0, "count_mixed_groups": True})
    check_estimator("gpg", samples_per_prompt=2, settings={"f_norm": 2.0})
    with pytest.raises(ValueError, match="'gpg' has no setting 'fnorm'; did you mean 'f_norm'"):
        check_adv_settings("gpg", {"fnorm": 2.0})
    with pytest.raises(ValueError, match="has no setting 'fnorm'"):
        check_estimator("gpg", samples_per_prompt=2, settings={"fnorm": 2.0})
    with pytest.raises(ValueError, match=r"'gamma' of .*'gae' has a key of its own: set algorithm\.gamma"):
        check_adv_settings("gae", {"gamma": 0.9})
    with pytest.raises(ValueError, match=r"'gdpo' has a key of its own: set algorithm\.reward_weights"):
        check_adv_settings("gdpo", {"reward_weights": [1.0, 2.0]})
    with pytest.raises(
        ValueError, match=r"'remax' has no setting 'f_norm'; it has none \(algorithm\.adv_settings\)"
    ):
        check_adv_settings("remax", {"f_norm": 2.0})
    with pytest.raises(ValueError, match="'handle_zero_tail' .* must be true or false"):
        check_adv_settings("optimal_token_baseline", {"handle_zero_tail": 1})


def test_an_optional_column_is_no_setting() -> None:
    with pytest.raises(ValueError, match="no setting 'rollout_is_weights'; .* It has handle_zero_tail "):
        check_adv_settings("optimal_token_baseline", {"rollout_is_weights": 1.0})
    assert "rollout_is_weights" in adv_estimator_columns("tir_optimal_token_baseline")
    assert adv_estimator_columns("grpo") == {"rewards", "group_ids", "response_mask"}


def test_own_settings_reach_the_estimator() -> None:
    # Rewards 1 and 0, centered +-1/2; one of two is not 0, so alpha is 2; f_norm 4: +-1/4.
    args = {
        "token_level_rewards": double([[1.0], [0.0]]),
        "response_mask": torch.ones(2, 1),
        "group_ids": torch.tensor([0, 0]),
    }
    advantages, _ = estimate_advantages("gpg", settings={"f_norm": 4.0, "gamma": 0.5, "nobody": 1}, **args)
    torch.testing.assert_close(advantages, double([[0.25], [-0.25]]))
