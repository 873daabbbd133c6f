"""Every registered estimator keeps the contract, and each planted bug breaks a rule of it."""

from __future__ import annotations

import pytest
import torch
from algorithms.contract.estimator_batches import COLUMNS, random_batch
from algorithms.contract.estimator_rules import RULES, EstimatorTraits
from algorithms.contract.estimators import TRAITS, check_adv_estimator
from algorithms.planted_bugs import (
    batch_mean,
    centered,
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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn
from strop.algorithms.advantages.group_relative import grpo_advantages
from strop.algorithms.advantages.groups import center_groups, expand_to_tokens
from strop.algorithms.registry import Declaration

OUTCOME = Declaration(needs=frozenset({"rewards", "group_ids", "response_mask"}), is_group_relative=True)
COMPARES = EstimatorTraits(compares_groups=True, is_shift_invariant=True, scaling="linear")


def test_every_shipped_estimator_has_traits() -> None:
    rooms = ("strop.algorithms", "strop.algorithms", "strop.workers")
    shipped = {name for name, fn in ADV_ESTIMATOR_REGISTRY.items() if fn.__module__.startswith(rooms)}
    assert shipped == set(TRAITS)


@pytest.mark.parametrize("name", sorted(TRAITS))
@given(seed=st.integers(0, 2**31))
@settings(max_examples=6, deadline=None)
def test_shipped_estimators_keep_every_rule(name: str, seed: int) -> None:
    assert check_adv_estimator(name, seed=seed, num_batches=1) == []


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("grpo", {"norm_by_std": False}),
        ("grpo_passk", {"norm_by_std": False}),
        ("gpg", {"count_mixed_groups": True, "f_norm": 3.0}),
        ("gdpo", {"reward_weights": (1.0, 0.5, 2.0)}),
        ("gae", {"gamma": 1.0, "lam": 1.0}),
    ],
)
def test_rules_hold_for_other_settings(name: str, numbers: dict[str, object]) -> None:
    traits = TRAITS[name]
    if not numbers.get("norm_by_std", True):
        traits = EstimatorTraits(compares_groups=True, is_shift_invariant=True, scaling="linear")
    assert check_adv_estimator(name, settings=numbers, traits=traits, num_batches=12) == []


def test_mixed_groups_make_gpg_shift_invariant() -> None:
    claims = EstimatorTraits(
        compares_groups=True, is_shift_invariant=True, is_batch_wide=True, scaling="linear"
    )
    rule = "a constant added to a group changes nothing"
    assert check_adv_estimator("gpg", traits=claims, settings={"count_mixed_groups": True}) == []
    assert rule in rules_broken_by(get_adv_estimator_fn("gpg"), claims=claims)


def rules_broken_by(
    function: object, declaration: Declaration | None = None, claims: EstimatorTraits | None = COMPARES
) -> set[str]:
    findings = check_adv_estimator(function, declaration=declaration, traits=claims)  # type: ignore[arg-type]
    assert all(finding.sentence for finding in findings)
    return {finding.rule for finding in findings}


def raw_lone_reward(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    _, group, count = center_groups(rewards, group_ids)
    advantages = torch.where((count == 1)[group], rewards, centered(rewards, group_ids))
    return expand_to_tokens(advantages, response_mask), expand_to_tokens(advantages, response_mask)


def rounding_magnified(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(rewards)
    for group in group_ids.unique():
        peers = rewards[group_ids == group]
        if len(peers) > 1:
            total = torch.zeros(1, dtype=rewards.dtype).index_add(
                0, torch.zeros(len(peers), dtype=torch.int64), peers
            )
            out[group_ids == group] = (peers - total / len(peers)) / (peers.std() + 1e-6)
    return expand_to_tokens(out, response_mask), expand_to_tokens(out, response_mask)


def ids_as_indices(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Large ids fall into one group."""
    return right(rewards=rewards, group_ids=group_ids.clamp(min=0), response_mask=response_mask)


def squared(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    return right(rewards=rewards**2, group_ids=group_ids, response_mask=response_mask)


def test_a_right_estimator_has_no_findings() -> None:
    assert rules_broken_by(right) == set()


@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        (flipped_sign, "a higher reward has the higher advantage"),
        (dropped_mask, "zero outside the mask"),
        (raw_lone_reward, "a group of one has advantage 0"),
        (rounding_magnified, "equal rewards give exactly 0"),
        (batch_mean, "prompts do not see each other"),
        (contiguous_pairs, "the order of rows never matters"),
        (masked_rewards, "a reward counts wherever it sits"),
        (padded_length, "padding never matters"),
        (unmasked_values, "values outside the mask never matter"),
        (in_place, "inputs stay as they are"),
        (single_precision, "float64 and finite"),
        (divided_by_zero, "float64 and finite"),
        (ids_as_indices, "group ids are names"),
        (squared, "rewards scale as claimed"),
        (squared, "a constant added to a group changes nothing"),
        (too_narrow, "it runs"),
    ],
)
def test_planted_bugs_are_found(bug: object, rule: str) -> None:
    assert rule in rules_broken_by(bug)


def test_every_rule_has_a_planted_bug() -> None:
    planted = {case[1] for mark in test_planted_bugs_are_found.pytestmark for case in mark.args[1]}  # type: ignore[attr-defined]
    assert planted == {*RULES, "it runs"}


def test_a_function_of_verls_convention_is_checked_too() -> None:
    def field_grpo(token_level_rewards, response_mask, config=None, index=None, **kwargs):  # type: ignore[no-untyped-def]
        groups = torch.tensor([int(i) for i in index])
        advantages = grpo_advantages(token_level_rewards.sum(-1), groups, response_mask)
        return advantages, advantages

    def field_raw(token_level_rewards, response_mask, config=None, index=None, **kwargs):  # type: ignore[no-untyped-def]
        scores = (token_level_rewards * response_mask).sum(-1, keepdim=True) * response_mask
        return scores, scores

    claims = EstimatorTraits(compares_groups=True, is_shift_invariant=True, scaling="invariant")
    assert rules_broken_by(field_grpo, claims=claims) == set()
    assert rules_broken_by(field_raw, claims=None) == {"a reward counts wherever it sits"}


def test_columns_of_a_plain_function_are_read_from_its_signature() -> None:
    # `right` is not registered: its required parameters are columns, and groups among them make it group-relative.
    assert check_adv_estimator(right) == []
    assert "a group of one has advantage 0" in rules_broken_by(raw_lone_reward, claims=None)
    assert rules_broken_by(right, declaration=OUTCOME) == set()


def test_a_finding_shows_the_numbers() -> None:
    findings = check_adv_estimator(flipped_sign)
    assert [f.sentence for f in findings if f.rule == "a higher reward has the higher advantage"] == [
        "flipped_sign: of two answers to one prompt, reward 1 got the advantage -0.5 and reward 0 got 0.5"
    ]


def test_what_a_function_raises_is_a_finding() -> None:
    def broken(*, rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        raise KeyError("no such thing")

    findings = check_adv_estimator(broken)
    assert [(f.rule, f.sentence) for f in findings] == [
        ("it runs", "broken raised KeyError: 'no such thing'")
    ]


def test_batches_are_as_they_say() -> None:
    for seed in range(30):
        batch = random_batch(torch.Generator().manual_seed(seed))
        assert set(batch.columns()) == COLUMNS
        assert int(batch.response_mask.sum()) >= 2
        assert batch.group_ids[0] == batch.group_ids[1]
        before_the_first = (batch.response_mask.cumsum(dim=-1) == 0) & (batch.token_level_rewards != 0)
        assert not before_the_first.any()
        # The squared norm of a gradient is at least (1 - pi)^2.
        assert (batch.sum_pi_squared >= (2 * batch.log_probs).exp()).all()
