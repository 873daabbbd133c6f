"""Functions written for verl's calling convention run unchanged, and errors name them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.algorithms.advantages.verl_convention import adv_config, call_advantage_estimator, estimate
from strop.algorithms.aggregation import batch_totals, token_weights, weighted_sum
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.losses.clipped import clipped_policy_loss
from strop.algorithms.losses.verl_convention import call_policy_loss, loss_config
from strop.algorithms.masked_ops import masked_mean
from strop.algorithms.names import AGGREGATION_MODES
from strop.algorithms.registry import Declaration
from strop.algorithms.verl_aggregation import agg_loss
from strop.algorithms.verl_config import VerlConfig

MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)


def columns() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    old, moves, advantages = (
        torch.randn(MASK.shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    filled = {"log_probs": old + 0.3 * moves, "old_log_probs": old, "advantages": advantages}
    return {key: torch.where(MASK, column, torch.nan) for key, column in filled.items()}


def vanilla_of_verl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """PPO's loss as a file of verl would have it: config by attribute and by key, own reduction."""
    clip_low = config.clip_ratio_low if config.clip_ratio_low is not None else config.clip_ratio
    clip_high = config["clip_ratio_high"]
    clip_c = config.get("clip_ratio_c", 100.0)
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0))
    losses = torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - clip_low, 1 + clip_high))
    losses = torch.where(advantages < 0, torch.min(-advantages * clip_c, losses), losses)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(
        loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    moved = masked_mean(old_log_prob - log_prob, response_mask)
    return loss, {"actor/ppo_kl": moved.detach().item(), "actor/rows": 1 - response_mask[0, 0]}


def call(
    function: Any,
    given: dict[str, Tensor],
    mask: Tensor,
    algorithm: AlgorithmConfig,
    mode: str,
    **own: object,
) -> tuple[Tensor, Any, Tensor]:
    log_probs = given["log_probs"].clone().requires_grad_()
    config = loss_config(algorithm, name="mine", totals=batch_totals(MASK), loss_agg_mode=mode, settings=own)
    got = call_policy_loss(
        function, columns={**given, "log_probs": log_probs}, mask=mask, loss_agg_mode=mode, config=config
    )
    (by_log_probs,) = torch.autograd.grad(got.loss, log_probs)
    return got.loss.detach(), got.metrics, by_log_probs


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_a_loss_of_verl_is_the_loss_of_the_whole_batch_in_any_cut(mode: str) -> None:
    scale = 7.0 if mode == "seq-mean-token-sum-norm" else None
    algorithm = AlgorithmConfig(
        clip_ratio=0.25,
        clip_ratio_high=0.3,
        loss_agg_mode=mode,
        loss_scale_factor=scale,  # type: ignore[arg-type]
    )
    given = columns()
    clean = {key: torch.where(MASK, column, 0.0) for key, column in given.items()}
    log_probs = clean["log_probs"].requires_grad_()
    totals = batch_totals(MASK)
    weights = token_weights(
        mode,
        MASK,
        num_tokens=totals.num_tokens,
        num_samples=totals.num_samples,
        scale=scale,
        dtype=torch.float64,
    )
    ours = clipped_policy_loss(
        log_probs, clean["old_log_probs"], clean["advantages"], clip_low=0.25, clip_high=0.3, clip_c=3.0
    )
    expected = weighted_sum(ours.terms, weights)
    (gradient,) = torch.autograd.grad(expected, log_probs)
    whole = call(vanilla_of_verl, given, MASK, algorithm, mode)
    parts = [
        call(vanilla_of_verl, {k: c[rows] for k, c in given.items()}, MASK[rows], algorithm, mode)
        for rows in ([0], [1, 2], [3])
    ]
    torch.testing.assert_close(whole[0], expected.detach())
    torch.testing.assert_close(whole[2], gradient)
    torch.testing.assert_close(torch.stack([part[0] for part in parts]).sum(), expected.detach())
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), gradient)


def test_metrics_are_means_over_the_tokens_of_the_part() -> None:
    _, metrics, _ = call(vanilla_of_verl, columns(), MASK, AlgorithmConfig(), "token-mean")
    given = columns()
    expected = (given["old_log_probs"] - given["log_probs"])[MASK].mean()
    torch.testing.assert_close(metrics["actor/ppo_kl"], expected)
    assert metrics["actor/rows"].item() == 0.0


def test_importance_weights_reach_a_loss_that_takes_them_and_are_never_lost() -> None:
    given = {**columns(), "rollout_is_weights": torch.where(MASK, 2.0, torch.nan).double()}
    plain, _, _ = call(vanilla_of_verl, columns(), MASK, AlgorithmConfig(), "token-mean")
    weighted, _, _ = call(vanilla_of_verl, given, MASK, AlgorithmConfig(), "token-mean")
    torch.testing.assert_close(weighted, 2 * plain)

    def without(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> object:
        raise AssertionError("never called")

    with pytest.raises(
        ValueError, match="without has no parameter rollout_is_weights, so the importance weights"
    ):
        call(without, given, MASK, AlgorithmConfig(), "token-mean")


def test_the_older_form_with_four_results_is_taken() -> None:
    seen: dict[str, Tensor] = {}

    def older(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_log_probs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert rollout_log_probs is not None
        seen["rollout"] = rollout_log_probs
        loss = agg_loss(-log_prob * advantages, response_mask, loss_agg_mode, **config.global_batch_info)
        return loss, torch.tensor(0.25), torch.tensor(0.5), torch.tensor(0.0)

    given = {**columns(), "rollout_log_probs": torch.where(MASK, -1.0, torch.nan).double()}
    _, metrics, gradient = call(older, given, MASK, AlgorithmConfig(), "token-mean")
    assert {key: item.item() for key, item in metrics.items()} == {
        "actor/pg_clipfrac": 0.25,
        "actor/ppo_kl": 0.5,
        "actor/pg_clipfrac_lower": 0.0,
    }
    assert torch.equal(seen["rollout"], torch.where(MASK, -1.0, 0.0).double())
    torch.testing.assert_close(gradient[MASK], -given["advantages"][MASK] / 8)


def test_the_config_of_a_loss_has_what_verl_reads() -> None:
    algorithm = AlgorithmConfig(clip_ratio=0.1, clip_ratio_high=0.4, entropy_coeff=0.01)
    config = loss_config(
        algorithm,
        name="mine",
        totals=batch_totals(MASK),
        loss_agg_mode="token-mean",
        settings={"beta": 2.0, "entropy_coeff": 9.0},
    )
    assert (config.clip_ratio, config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c) == (
        0.1,
        0.1,
        0.4,
        3.0,
    )
    assert config.policy_loss.loss_mode == "mine"
    assert config.policy_loss.get("beta", 1.0) == config["policy_loss"]["beta"] == config.beta == 2.0
    assert config.get("gamma_of_mine", 5) == 5
    assert "beta" in config
    assert config.entropy_coeff == 0.01  # a key of the config is not shadowed by a setting of that name
    assert config.policy_loss.entropy_coeff == 9.0
    assert dict(config.global_batch_info) == {
        "dp_size": 1,
        "batch_num_tokens": 8,
        "global_batch_size": 3,
        "loss_scale_factor": None,
    }
    assert config.kl_ctrl.kl_coef == config.kl_ctrl["kl_coef"] == 0.001
    with pytest.raises(AttributeError, match="no clip_ration; did you mean clip_ratio"):
        _ = config.clip_ration
    with pytest.raises(AttributeError, match="cannot be changed: clip_ratio was set to 0.5"):
        config.clip_ratio = 0.5
    with pytest.raises(KeyError):
        _ = config["clip_ration"]


def returns(result: object) -> Any:
    def mine(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> object:
        return result(log_prob) if callable(result) else result

    return mine


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            lambda log_prob: log_prob.sum(),
            r"mine returned a tensor of shape \(\), but a policy loss returns \(loss, ",
        ),
        (
            lambda log_prob: (log_prob, {}),
            r"mine returned a loss of shape \(4, 4\), but a loss is one number",
        ),
        (lambda log_prob: (log_prob.sum(), 1.0), r"mine returned \(a tensor of shape \(\), a float\), but"),
        (lambda log_prob: (log_prob.sum().detach(), {}), "mine returned a loss without a gradient"),
        (
            lambda log_prob: (log_prob.sum(), {"m": log_prob}),
            r"metric 'm' as a tensor of shape \(4, 4\); a metric is",
        ),
        (None, "mine returned None, but a policy loss"),
    ],
)
def test_a_result_of_another_form_is_described(result: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(returns(result), columns(), MASK, AlgorithmConfig(), "token-mean")


def test_a_parameter_that_nobody_fills_is_named() -> None:
    def mine(log_prob: Tensor, entropy: Tensor) -> object:
        raise AssertionError("never called")

    with pytest.raises(ValueError, match="mine requires entropy, which nobody gives it"):
        call(mine, columns(), MASK, AlgorithmConfig(), "token-mean")


def test_flat_columns_are_refused() -> None:
    flat = {key: column.reshape(-1) for key, column in columns().items()}
    with pytest.raises(ValueError, match=r"takes padded columns \[B, R\], but the mask has shape \(16,\)"):
        call(vanilla_of_verl, flat, MASK.reshape(-1), AlgorithmConfig(), "token-mean")


def group_mean_of_verl(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """A group baseline as a file of verl would have it, with loops and a dictionary of uids."""
    scores = token_level_rewards.sum(dim=-1)
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for i in range(scores.shape[0]):
        groups[index[i]].append(scores[i])
    means = {uid: torch.mean(torch.stack(members)) for uid, members in groups.items()}
    for i in range(scores.shape[0]):
        scores[i] = scores[i] - means[index[i]]
        if config.norm_adv_by_std_in_grpo:
            scores[i] = scores[i] / (1.0 + epsilon)
    scores = scores.unsqueeze(-1) * response_mask
    scores = scores + kwargs.get("bonus", 0)
    return scores, scores


def test_an_estimator_of_verl_runs_and_is_zero_outside_the_mask() -> None:
    # Rewards 1 and 0 in group a: -+1/2; 3 alone in group b: 0. A bonus of 10 reaches only sampled tokens.
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [3.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]], dtype=torch.bool)
    index = np.array(["a", "a", "b"], dtype=object)
    config = adv_config(AlgorithmConfig(norm_adv_by_std=False), settings={"mine": 1})
    assert config.mine == 1
    advantages, got_returns = call_advantage_estimator(
        group_mean_of_verl,
        token_level_rewards=rewards,
        response_mask=mask,
        index=index,
        config=config,
        extra={"bonus": torch.full((3, 2), 10.0), "values": None},
    )
    expected = torch.tensor([[10.5, 10.5], [9.5, 0.0], [10.0, 10.0]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(got_returns, expected)


def test_an_estimator_of_verl_gets_the_batch_and_the_parts_of_the_reward() -> None:
    def by_parts(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        config: Any,
        batch: Any,
        non_tensor_batch: Any,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        assert non_tensor_batch["uid"].tolist() == ["a", "a", "b"]
        assert batch["old_log_probs"].shape == batch["response_mask"].shape
        with pytest.raises(KeyError, match=r"has uid, acc, style and no 'speed'.*needs=\['reward_parts'\]"):
            non_tensor_batch["speed"]
        parts = torch.tensor(np.array(non_tensor_batch["style"], dtype=np.float32))
        return parts[:, None] * response_mask, parts[:, None] * response_mask

    mask = torch.tensor([[1, 1], [1, 0], [1, 1]], dtype=torch.bool)
    columns = {
        "token_level_rewards": torch.zeros(3, 2),
        "rewards": torch.zeros(3),
        "response_mask": mask,
        "group_ids": torch.tensor([0, 0, 1]),
        "old_log_probs": torch.zeros(3, 2),
        "reward_parts": torch.tensor([[1.0, 0.25], [0.0, 0.5], [1.0, 0.75]]),
    }
    advantages, _ = estimate(
        by_parts,
        Declaration(needs=frozenset({"reward_parts"}), follows_verl=True),
        columns,
        {},
        AlgorithmConfig(reward_keys=("acc", "style")),
        ["a", "a", "b"],
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.25, 0.25], [0.5, 0.0], [0.75, 0.75]]))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            torch.zeros(3, 2),
            r"estimator returned a tensor of shape \(3, 2\), but an advantage estimator returns",
        ),
        (
            (torch.zeros(3), torch.zeros(3, 2)),
            r"returned \(a tensor of shape \(3,\), a tensor of shape \(3, 2\)\), but",
        ),
        ((torch.full((3, 2), torch.nan), torch.zeros(3, 2)), "estimator returned 5 advantages that are NaN"),
    ],
)
def test_an_estimator_that_returns_another_form_is_described(result: object, message: str) -> None:
    def estimator(token_level_rewards: Tensor, response_mask: Tensor) -> object:
        return result

    mask = torch.tensor([[1, 1], [1, 0], [1, 1]], dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        call_advantage_estimator(
            estimator,
            token_level_rewards=torch.zeros(3, 2),
            response_mask=mask,
            index=None,
            config=VerlConfig({}),
        )
