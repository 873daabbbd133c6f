"""Every registered loss keeps the contract, and each planted bug breaks a rule of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from algorithms.contract.policy_losses import check_policy_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from probing import ratio, terms
from torch import Tensor

from strop.algorithms.losses import POLICY_LOSS_REGISTRY, PolicyLossTerms
from strop.algorithms.names import AGGREGATION_MODES
from strop.algorithms.verl_aggregation import agg_loss
from strop.algorithms.verl_config import VerlConfig

NAMES = sorted({function: name for name, function in reversed(POLICY_LOSS_REGISTRY.items())}.values())
"""One name per function; an alias would be checked twice."""
# Numbers under which clips and choices act on the check's small batch.
SETTINGS: dict[str, dict[str, object]] = {
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0},
    "kl_cov": {"kl_cov_ratio": 0.3},
    "gspo": {"clip_low": 0.03, "clip_high": 0.04},
    "gmpo": {"clip_low": 0.1, "clip_high": 0.1},
}


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=5, deadline=None)
def test_registered_losses_keep_every_rule(name: str, seed: int) -> None:
    assert check_policy_loss(name, settings=SETTINGS.get(name, {}), seed=seed) == []


@pytest.mark.parametrize("mode", [m for m in AGGREGATION_MODES if m != "seq-mean-token-sum-norm"])
def test_losses_keep_the_rules_under_every_aggregation(mode: str) -> None:
    for name in NAMES:
        assert check_policy_loss(name, loss_agg_mode=mode) == [], name


def rules(loss: Callable[..., object]) -> set[str]:
    found = check_policy_loss(loss)
    assert len({finding.sentence for finding in found}) == len(found)
    return {finding.rule for finding in found}


def plain(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return terms(-ratio(log_probs, old_log_probs) * advantages)


def unclamped(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return terms(-(log_probs - old_log_probs).exp() * advantages)


def flipped(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return terms(ratio(log_probs, old_log_probs) * advantages)


def sign_lost(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return terms(-ratio(log_probs, old_log_probs) * advantages.abs())


def row_mean_without_mask(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    log_ratio = (log_probs - old_log_probs).mean(dim=-1, keepdim=True).expand(log_probs.shape)
    return terms(-log_ratio.exp() * advantages)


def batch_whitened(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
) -> PolicyLossTerms:
    mean = advantages[response_mask].mean()
    return terms(-ratio(log_probs, old_log_probs) * torch.where(response_mask, advantages - mean, 0.0))


def position_bonus(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    numbers = torch.arange(advantages.shape[0], dtype=advantages.dtype)
    weight = 1 + numbers.reshape(-1, *[1] * (advantages.dim() - 1))
    return terms(-ratio(log_probs, old_log_probs) * advantages * weight)


def entropy_pull(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return terms(-ratio(log_probs, old_log_probs) * advantages + 0.1 * log_probs)


def noisy(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return terms(-ratio(log_probs, old_log_probs) * advantages * (1 + 0.1 * torch.rand_like(advantages)))


def writes(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    advantages /= 2
    return terms(-ratio(log_probs, old_log_probs) * advantages)


def attached(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    moved = ratio(log_probs, old_log_probs)
    return terms(-moved * advantages, ratio=moved)


def detached(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return terms(-ratio(log_probs.detach(), old_log_probs) * advantages)


def reduced(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return terms((-ratio(log_probs, old_log_probs) * advantages).mean())


def divides_by_row_length(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, row_ids: Tensor
) -> PolicyLossTerms:
    """0 / 0 where a response has no token, and then on to the batch through the sum."""
    rows, valid = row_ids.reshape(-1), response_mask.reshape(-1)
    zeros = torch.zeros(int(rows.max()) + 1, dtype=advantages.dtype)
    count = zeros.index_add(0, rows, valid.to(advantages.dtype))
    share = zeros.index_add(0, rows, (advantages * response_mask).reshape(-1)) / count
    return terms(-ratio(log_probs, old_log_probs) * advantages * (1 + 0 * share.sum()))


def old_and_new_swapped(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return terms(-ratio(old_log_probs, log_probs) * advantages)


def test_a_sound_loss_has_no_findings() -> None:
    assert rules(plain) == set()


@pytest.mark.parametrize(
    ("loss", "rule"),
    [
        (unclamped, "extreme log-ratio"),
        (flipped, "on-policy"),
        (sign_lost, "on-policy"),
        (old_and_new_swapped, "on-policy"),
        (detached, "on-policy"),
        (row_mean_without_mask, "outside the mask"),
        (row_mean_without_mask, "padding width"),
        (batch_whitened, "cut of the batch"),
        (position_bonus, "order of rows"),
        (entropy_pull, "zero advantage"),
        (noisy, "repeatable"),
        (writes, "inputs"),
        (attached, "statistics"),
        (reduced, "form"),
        (divides_by_row_length, "empty row"),
    ],
)
def test_a_planted_bug_is_found(loss: Callable[..., object], rule: str) -> None:
    assert rule in rules(loss)


@pytest.mark.parametrize(
    ("loss", "rule"),
    [
        (unclamped, "extreme log-ratio"),
        (entropy_pull, "zero advantage"),
        (attached, "statistics"),
        (reduced, "form"),
        (divides_by_row_length, "empty row"),
    ],
)
def test_one_bug_gives_one_finding(loss: Callable[..., object], rule: str) -> None:
    found = rules(loss) - ({"on-policy"} if loss is entropy_pull else set())
    assert found == {rule}


def test_findings_carry_the_numbers() -> None:
    sentences = {finding.rule: finding.sentence for finding in check_policy_loss(unclamped)}
    assert "log-ratio 50 in float32: the loss is" in sentences["extreme log-ratio"]
    (zero,) = (f.sentence for f in check_policy_loss(entropy_pull) if f.rule == "zero advantage")
    # 0.1 per token, over the 17 tokens of the batch.
    assert "gradient not zero at zero advantage: up to 0.00588" in zero
    (on_policy,) = (f.sentence for f in check_policy_loss(flipped))
    assert "is -1 to -1 times that of REINFORCE" in on_policy
    assert "away from rewarded answers" in on_policy


def verl_plain(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: VerlConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    assert config is not None
    moved = ratio(log_prob, old_log_prob)
    values = torch.maximum(
        -moved * advantages,
        -moved.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high) * advantages,
    )
    if rollout_is_weights is not None:
        values = values * rollout_is_weights
    loss = agg_loss(values, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/ratio": float(moved.detach().mean())}


def field_local_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: VerlConfig | None = None,
) -> tuple[Tensor, dict[str, float]]:
    return agg_loss(-ratio(log_prob, old_log_prob) * advantages, response_mask, loss_agg_mode), {}


def field_padded_mean(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str = ""
) -> tuple[Tensor, dict[str, float]]:
    return (-ratio(log_prob, old_log_prob) * advantages * response_mask).mean(), {}


def field_weights_ignored(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: VerlConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    return verl_plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)


def verl_unreduced(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, dict[str, float]]:
    return -ratio(log_prob, old_log_prob) * advantages, {}


def test_a_sound_loss_of_verls_convention_has_no_findings() -> None:
    assert rules(verl_plain) == set()


def test_bugs_in_losses_of_verls_convention_are_found() -> None:
    assert rules(field_local_mean) == {"cut of the batch"}
    assert {"padding width", "cut of the batch"} <= rules(field_padded_mean)
    assert rules(field_weights_ignored) == {"importance weights"}
    (finding,) = check_policy_loss(verl_unreduced)
    assert finding.rule == "form"
    assert "verl_unreduced returned a loss of shape (5, 6), but a loss is one number" in finding.sentence


def test_what_the_check_cannot_supply_is_refused() -> None:
    def hungry(log_probs: Tensor, values: Tensor) -> PolicyLossTerms:
        return terms(log_probs * values)

    with pytest.raises(ValueError, match="'hungry' needs values, which the check's batch does not have"):
        check_policy_loss(hungry)
    with pytest.raises(ValueError, match="'sapo' has no setting 'tau'; did you mean 'tau_"):
        check_policy_loss("sapo", settings={"tau": 1.0})
