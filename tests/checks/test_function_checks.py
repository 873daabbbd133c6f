"""`strop check loss` and `strop check estimator`: silent on what comes with strop, loud on each planted bug."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from algorithms.planted_bugs import (
    batch_mean,
    contiguous_pairs,
    divided_by_zero,
    dropped_mask,
    flipped_sign,
    in_place,
    masked_rewards,
    padded_length,
    right,
    single_precision,
    too_narrow,
    unmasked_values,
)
from torch import Tensor

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.losses import POLICY_LOSS_REGISTRY, PolicyLossTerms
from strop.cli.check_functions.estimators import check_adv_estimator
from strop.cli.check_functions.policy_losses import check_policy_loss

ROOMS = ("strop.algorithms", "strop.algorithms", "strop.workers")


def shipped(registry: dict[str, Callable[..., object]]) -> list[str]:
    return sorted(name for name, function in registry.items() if function.__module__.startswith(ROOMS))


@pytest.mark.parametrize("name", shipped(POLICY_LOSS_REGISTRY))
def test_losses_that_come_with_strop_keep_every_rule(name: str) -> None:
    assert check_policy_loss(name) == []


@pytest.mark.parametrize("name", shipped(ADV_ESTIMATOR_REGISTRY))
def test_estimators_that_come_with_strop_keep_every_rule(name: str) -> None:
    assert check_adv_estimator(name) == []


def ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs - old_log_probs).clamp(-20, 20).exp()


def plain(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return PolicyLossTerms(terms=-ratio(log_probs, old_log_probs) * advantages, statistics={})


def unclamped(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return PolicyLossTerms(terms=-(log_probs - old_log_probs).exp() * advantages, statistics={})


def flipped(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return plain(log_probs, old_log_probs, -advantages)


def detached(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return plain(log_probs.detach(), old_log_probs, advantages)


def whole_rows(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    log_ratio = (log_probs - old_log_probs).mean(dim=-1, keepdim=True).expand(log_probs.shape)
    return PolicyLossTerms(terms=-log_ratio.exp() * advantages, statistics={})


def whitened(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
) -> PolicyLossTerms:
    mean = advantages[response_mask].mean()
    return plain(log_probs, old_log_probs, torch.where(response_mask, advantages - mean, 0.0))


def by_position(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    numbers = torch.arange(advantages.shape[0], dtype=advantages.dtype)
    weight = 1 + numbers.reshape(-1, *[1] * (advantages.dim() - 1))
    return plain(log_probs, old_log_probs, advantages * weight)


def halves_in_place(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    advantages /= 2
    return plain(log_probs, old_log_probs, advantages)


def reduced(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return PolicyLossTerms(terms=plain(log_probs, old_log_probs, advantages).terms.mean(), statistics={})


def infinite(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return PolicyLossTerms(terms=log_probs * advantages / 0.0, statistics={})


def test_a_sound_loss_has_no_findings() -> None:
    assert check_policy_loss(plain) == []


@pytest.mark.parametrize(
    ("loss", "rule", "sentence"),
    [
        (unclamped, "extreme log-ratio", "at log-ratio 50 in float32: the loss is"),
        (flipped, "on-policy", "is -1 to -1 times that of REINFORCE"),
        (detached, "on-policy", "nothing is ever learned"),
        (whole_rows, "outside the mask", "tokens outside the mask have a gradient"),
        (whole_rows, "padding width", "with 3 more positions of it"),
        (whitened, "cut of the batch", "for two and three responses in two calls"),
        (by_position, "order of rows", "changes with the order of the responses"),
        (halves_in_place, "inputs", "advantages changed"),
        (reduced, "form", "shape"),
        (infinite, "finite", "on ordinary numbers the loss is"),
    ],
)
def test_a_bug_in_a_loss_is_found(loss: Callable[..., object], rule: str, sentence: str) -> None:
    assert sentence in {finding.rule: finding.sentence for finding in check_policy_loss(loss)}[rule]


def test_a_loss_that_reads_outside_the_mask_without_a_gradient_is_found() -> None:
    def reads(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        return plain(log_probs, old_log_probs, advantages * (1 + 0.1 * advantages.mean(-1, keepdim=True)))

    found = {finding.rule: finding.sentence for finding in check_policy_loss(reads)}
    assert "depends on values outside the mask: with 7.25 there" in found["outside the mask"]


def test_columns_that_the_check_does_not_have_are_refused() -> None:
    def hungry(log_probs: Tensor, values: Tensor) -> PolicyLossTerms:
        return PolicyLossTerms(terms=log_probs * values, statistics={})

    with pytest.raises(ValueError, match="'hungry' needs values, which the check's batch does not have"):
        check_policy_loss(hungry)


def test_a_right_estimator_has_no_findings() -> None:
    assert check_adv_estimator(right) == []


@pytest.mark.parametrize(
    ("estimator", "rule", "sentence"),
    [
        (
            flipped_sign,
            "a higher reward has the higher advantage",
            "reward 1 got the advantage -0.5 and reward 0 got 0.5",
        ),
        (dropped_mask, "zero outside the mask", "a token outside the mask has advantage"),
        (batch_mean, "a group of one has advantage 0", "it has nothing to be compared with"),
        (contiguous_pairs, "the order of rows never matters", "with rows in another order"),
        (masked_rewards, "a reward counts wherever it sits", "with rewards moved from given tokens"),
        (padded_length, "padding never matters", "with two columns of padding on the right"),
        (unmasked_values, "values outside the mask never matter", "weights outside the mask"),
        (in_place, "inputs stay as they are", "the call changed values in place"),
        (single_precision, "float64 and finite", "float64 columns gave advantages of torch.float32"),
        (divided_by_zero, "float64 and finite", "finite columns gave the advantages"),
        (too_narrow, "it runs", "too_narrow raised"),
    ],
)
def test_a_bug_in_an_estimator_is_found(estimator: Callable[..., object], rule: str, sentence: str) -> None:
    found = {finding.rule: finding.sentence for finding in check_adv_estimator(estimator)}  # type: ignore[arg-type]
    assert sentence in found[rule]


def test_a_function_of_verls_convention_is_checked_too() -> None:
    def raw(token_level_rewards, response_mask, config=None, index=None, **kwargs):  # type: ignore[no-untyped-def]
        scores = (token_level_rewards * response_mask).sum(-1, keepdim=True) * response_mask
        return scores, scores

    assert [finding.rule for finding in check_adv_estimator(raw)] == ["a reward counts wherever it sits"]


def test_an_estimator_may_ask_for_parts_of_the_reward_by_any_name() -> None:
    """As verl's, whose batch has the mask as 0 and 1."""

    def styled(token_level_rewards, response_mask, batch, non_tensor_batch, **kwargs):  # type: ignore[no-untyped-def]
        style, length = (torch.tensor(non_tensor_batch[name].astype(float)) for name in ("style", "length"))
        is_outside = 1 - batch["response_mask"]
        scores = (style + 2 * length)[:, None] * (1 - is_outside)
        return scores, scores

    assert check_adv_estimator(styled) == []
