"""Estimators where a comparison could be off by one value, a group by one sample, or a place by one token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.advantages import (
    ADV_ESTIMATOR_REGISTRY,
    adv_estimator_columns,
    call_estimator,
    estimate_advantages,
    get_adv_estimator_fn,
    register_adv_est,
)
from strop.algorithms.advantages.group_baselines import maxrl_advantages, opo_advantages
from strop.algorithms.registry import Declaration


@pytest.fixture
def scratch_registry() -> Iterator[None]:
    before, declared = dict(ADV_ESTIMATOR_REGISTRY), dict(ADV_ESTIMATOR_REGISTRY.declarations)
    yield
    ADV_ESTIMATOR_REGISTRY.clear()
    ADV_ESTIMATOR_REGISTRY.update(before)
    ADV_ESTIMATOR_REGISTRY.declarations.clear()
    ADV_ESTIMATOR_REGISTRY.declarations.update(declared)


def double(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_maxrl_names_the_negative_rewards_alone() -> None:
    rewards = double([0.0, -0.25, 1.0, -0.5])
    with pytest.raises(ValueError, match=r"those of rows \[1, 3\] are negative \(lowest -0.5\)"):
        maxrl_advantages(rewards, torch.zeros(4, dtype=torch.int64), torch.ones(4, 1))
    many = torch.full((12,), -1.0)
    with pytest.raises(ValueError, match=r"those of rows \[0, 1, 2, 3, 4, 5, 6, 7\] are negative"):
        maxrl_advantages(many, torch.zeros(12, dtype=torch.int64), torch.ones(12, 1))


def test_opo_of_a_group_with_one_token_in_all() -> None:
    # Lengths 1 and 0: the baseline is the reward of the one that has a token, so its advantage is 0.
    mask = torch.tensor([[0, 1], [0, 0], [1, 1], [1, 0]])
    got = opo_advantages(double([3.0, 5.0, 1.0, 4.0]), torch.tensor([0, 0, 1, 1]), mask)
    # The other group: (2 * 1 + 4) / 3 = 2.
    torch.testing.assert_close(got, double([[0.0, 0.0], [0.0, 0.0], [-1.0, -1.0], [2.0, 0.0]]))


PLAIN = Declaration(needs=frozenset({"rewards"}))


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (None, "returned None: return"),
        (3.0, "returned a float: return"),
        ((torch.zeros(2, 3),), r"returned \(a tensor of shape \(2, 3\)\): return"),
        ((torch.zeros(2, 3),) * 3, r"returned \(a .*, a .*, a tensor of shape \(2, 3\)\): return"),
        ([torch.zeros(2, 3)] * 3, "returned a list: return"),
        (torch.zeros(2, 3), r"returned a tensor of shape \(2, 3\): return"),
        ((torch.zeros(2, 3), torch.zeros(2)), r"returned a tensor of shape \(2,\) as returns: return"),
        ((torch.zeros(2), torch.zeros(2, 3)), r"returned a tensor of shape \(2,\) as advantages: return"),
        (([0.0], torch.zeros(2, 3)), "returned a list as advantages: return"),
        ((torch.zeros(2, 3), 0), "returned a int as returns: return"),
    ],
)
def test_what_an_estimator_returns_is_described_where_it_is_wrong(result: object, described: str) -> None:
    columns = {"rewards": torch.zeros(2), "response_mask": torch.ones(2, 3)}

    def estimator(*, rewards: Tensor) -> Any:
        return result

    with pytest.raises(
        ValueError, match=rf"'mine' {described} \(advantages, returns\), two tensors of shape \[2, 3\]"
    ):
        call_estimator("mine", estimator, PLAIN, columns=columns, settings={})


def test_two_tensors_in_a_list_will_do() -> None:
    columns = {"rewards": torch.zeros(2), "response_mask": torch.ones(2, 3)}
    both = [torch.zeros(2, 3), torch.ones(2, 3)]
    advantages, returns = call_estimator("mine", lambda *, rewards: both, PLAIN, columns=columns, settings={})
    assert (advantages.sum(), returns.sum()) == (0, 6)


@pytest.mark.usefixtures("scratch_registry")
def test_a_function_of_verl_reads_settings_that_nobody_set() -> None:
    seen: list[tuple[object, ...]] = []

    @register_adv_est("field")
    def field(
        token_level_rewards: Tensor, response_mask: Tensor, config: Any, index: Any
    ) -> tuple[Tensor, Tensor]:
        seen.append((config.gamma, config.lam, config.norm_adv_by_std_in_grpo, *index))
        return token_level_rewards, token_level_rewards

    rewards, mask, groups = torch.ones(2, 1), torch.ones(2, 1), torch.tensor([4, 7])
    for settings in ({}, {"gamma": 0.5, "lam": 0.25, "norm_by_std": False}):
        estimate_advantages(
            "field", token_level_rewards=rewards, response_mask=mask, group_ids=groups, settings=settings
        )
    assert seen == [(1.0, 1.0, True, 4, 7), (0.5, 0.25, False, 4, 7)]
    assert adv_estimator_columns("field") == {"rollout_is_weights"}
    assert adv_estimator_columns("opo") == {"rewards", "group_ids", "response_mask"}
    assert "rollout_is_weights" in adv_estimator_columns("optimal_token_baseline")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_remax_refuses_a_greedy_answer_without_a_reward(bad: float) -> None:
    with pytest.raises(ValueError, match=r"reward_baselines must be finite, but those of rows \[1\] are not"):
        get_adv_estimator_fn("remax")(
            token_level_rewards=torch.zeros(2, 2),
            reward_baselines=torch.tensor([0.0, bad]),
            response_mask=torch.ones(2, 2),
        )


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_the_tail_beyond_a_peer_without_tokens_is_the_whole_response(name: str, num_tokens: int) -> None:
    mask = torch.tensor([[1] * num_tokens, [0] * num_tokens])
    rewards = torch.zeros(2, num_tokens, dtype=torch.float64)
    rewards[0, -1] = 3.0
    columns = {
        "old_log_probs": torch.full_like(rewards, -0.5),
        "sum_pi_squared": torch.full_like(rewards, 0.5),
    }
    for settings, expected in (({}, 0.0), ({"handle_zero_tail": True}, 3.0)):
        got, _ = estimate_advantages(
            name,
            token_level_rewards=rewards,
            response_mask=mask,
            group_ids=torch.tensor([0, 0]),
            settings=settings,
            columns=columns,
        )
        assert got.tolist() == [[expected] * num_tokens, [0.0] * num_tokens]
