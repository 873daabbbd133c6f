"""Rules that advantage estimators keep, one function each: what is wrong in a trial, in a sentence, or None.

Most hold for every estimator; those that ask `trial.traits` first hold where it is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from strop.cli.check_functions.estimator_batches import Batch, random_batch

TOLERANCE = 1e-9
"""Largest difference between numbers that differ by rounding; whitening magnifies 1e-16 by up to 1e4."""
SCALE_TOLERANCE = 1e-4
"""The same after rewards were scaled: the eps beside a standard deviation does not scale with them."""
GARBAGE = 37.5
"""Stands outside the mask; any finite number will do."""


@dataclass(frozen=True, kw_only=True)
class EstimatorTraits:
    """What is claimed of an estimator beyond the rules that hold for all."""

    compares_groups: bool = False
    """Samples of one prompt are compared: a group of one, and equal rewards, have advantage 0."""
    is_shift_invariant: bool = False
    """A constant added to every reward of a group changes nothing."""
    is_batch_wide: bool = False
    """A prompt's advantages depend on the other prompts of the batch (whitening)."""
    ignores_rewards: bool = False
    """Rewards chose the samples before: a higher one has no higher advantage."""
    scaling: Literal["none", "linear", "invariant"] = "none"
    """What rewards (with values and baselines) times c do: nothing known, advantages times c, the same."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One batch on which an estimator is tried."""

    estimate: Callable[[Batch], Tensor]
    """Advantages [B, R] of a batch."""
    batch: Batch
    traits: EstimatorTraits
    generator: torch.Generator
    """Of everything random in a rule."""


Rule = Callable[[Trial], str | None]


def _is_float64_and_finite(trial: Trial) -> str | None:
    got = trial.estimate(trial.batch)
    if got.dtype != torch.float64:
        return f"float64 columns gave advantages of {got.dtype}"
    if not torch.isfinite(got).all():
        return f"finite columns gave the advantages {got[~torch.isfinite(got)].tolist()[:4]}"
    return None


def _writes_into_nothing(trial: Trial) -> str | None:
    copy = trial.batch.map(torch.Tensor.clone)
    trial.estimate(copy)
    for name in trial.batch.__dataclass_fields__:
        if not torch.equal(getattr(copy, name), getattr(trial.batch, name)):
            return f"the call changed {name} in place; the trainer uses the columns again"
    return None


def _is_zero_outside_the_mask(trial: Trial) -> str | None:
    outside = trial.estimate(trial.batch)[~trial.batch.response_mask]
    wrong = outside[outside != 0]
    return f"a token outside the mask has advantage {wrong[0]:g}" if len(wrong) else None


def _ignores_values_outside_the_mask(trial: Trial) -> str | None:
    mask = trial.batch.response_mask
    changed = replace(
        trial.batch,
        **{
            name: torch.where(mask, getattr(trial.batch, name), GARBAGE)
            for name in ("values", "log_probs", "sum_pi_squared", "rollout_is_weights", "process_rewards")
        },
    )
    return _difference(
        trial.estimate(changed),
        trial.estimate(trial.batch),
        "other values, log-probs or weights outside the mask",
    )


def _ignores_padding(trial: Trial) -> str | None:
    num_rows, width = trial.batch.response_mask.shape

    def widen(column: Tensor) -> Tensor:
        if column.shape[1:] != (width,) or column is trial.batch.reward_parts:
            return column
        fill = 0.0 if column is trial.batch.token_level_rewards else GARBAGE
        if column is trial.batch.response_mask:
            return torch.cat([column, torch.zeros(num_rows, 2, dtype=torch.bool)], dim=1)
        return torch.cat([column, torch.full((num_rows, 2), fill, dtype=column.dtype)], dim=1)

    got = trial.estimate(trial.batch.map(widen))
    return _difference(got[:, :width], trial.estimate(trial.batch), "two columns of padding on the right")


def _follows_the_order_of_rows(trial: Trial) -> str | None:
    order = torch.randperm(len(trial.batch.group_ids), generator=trial.generator)
    got = trial.estimate(trial.batch.map(lambda column: column[order]))
    return _difference(got, trial.estimate(trial.batch)[order], "rows in another order")


def _takes_group_ids_as_names(trial: Trial) -> str | None:
    renamed = replace(trial.batch, group_ids=-7 * trial.batch.group_ids)
    return _difference(
        trial.estimate(renamed), trial.estimate(trial.batch), "other numbers for the same groups"
    )


def _counts_rewards_on_given_tokens(trial: Trial) -> str | None:
    moved = torch.zeros_like(trial.batch.token_level_rewards)
    for row, mask in enumerate(trial.batch.response_mask.tolist()):
        last = None
        for t, is_sampled in enumerate(mask):
            last = t if is_sampled else last
            if last is not None:
                moved[row, last] += trial.batch.token_level_rewards[row, t]
    change = "rewards moved from given tokens to the sampled token before each"
    return _difference(
        trial.estimate(replace(trial.batch, token_level_rewards=moved)), trial.estimate(trial.batch), change
    )


def _prefers_higher_rewards(trial: Trial) -> str | None:
    if trial.traits.ignores_rewards:
        return None
    # Two answers to one prompt that differ in nothing but their reward.
    rewards = torch.zeros(2, 2, dtype=torch.float64)
    rewards[0, 1] = 1.0
    twins = replace(
        trial.batch.map(_repeat_first(2)),
        token_level_rewards=rewards,
        response_mask=torch.ones(2, 2, dtype=torch.bool),
        reward_parts=torch.tensor([[1.0] * 3, [0.0] * 3], dtype=torch.float64),
        **{name: torch.full((2, 2), 0.5, dtype=torch.float64) for name in ("values", "sum_pi_squared")},
        log_probs=torch.full((2, 2), -1.0, dtype=torch.float64),
        process_rewards=torch.full((2, 2), 0.1, dtype=torch.float64),
        rollout_is_weights=torch.ones(2, 2, dtype=torch.float64),
        sample_index=torch.arange(2),
    )
    better, worse = trial.estimate(twins)[:, -1].tolist()
    if better > worse:
        return None
    return f"of two answers to one prompt, reward 1 got the advantage {better:g} and reward 0 got {worse:g}"


def _gives_lone_samples_zero(trial: Trial) -> str | None:
    if not trial.traits.compares_groups:
        return None
    alone = replace(trial.batch, group_ids=torch.cat([trial.batch.group_ids[:-1], torch.tensor([999])]))
    alone = replace(alone, response_mask=torch.cat([alone.response_mask[:-1], alone.response_mask[:1]]))
    wrong = trial.estimate(alone)[-1].abs().max().item()
    return (
        f"the only sample of a prompt has advantage {wrong:g}: it has nothing to be compared with"
        if wrong
        else None
    )


def _gives_equal_rewards_zero(trial: Trial) -> str | None:
    if not trial.traits.compares_groups:
        return None
    # The float mean of seven or eight times 0.1 may not be 0.1, by the order of the sum; divided by a standard
    # deviation of about 0, the rest is an advantage.
    for size in (7, 8):
        rewards = torch.zeros(size, 3, dtype=torch.float64)
        rewards[:, -1] = 0.1
        equal = replace(
            trial.batch.map(_repeat_first(size)),
            token_level_rewards=rewards,
            response_mask=torch.ones(size, 3, dtype=torch.bool),
            reward_parts=torch.full((size, 3), 0.1, dtype=torch.float64),
            **{
                name: torch.rand(size, 3, generator=trial.generator, dtype=torch.float64)
                for name in ("values", "sum_pi_squared", "rollout_is_weights")
            },
            log_probs=torch.full((size, 3), -0.5, dtype=torch.float64),
            process_rewards=torch.full((size, 3), 0.1, dtype=torch.float64),
            sample_index=torch.arange(size),
        )
        wrong = trial.estimate(equal).abs().max().item()
        if wrong:
            return f"{size} samples with reward 0.1 each got an advantage of {wrong:g}, not 0"
    return None


def _repeat_first(times: int) -> Callable[[Tensor], Tensor]:
    """The first row of a column, several times."""
    return lambda column: column[:1].repeat(times, *[1] * (column.dim() - 1))


def _ignores_a_constant(trial: Trial) -> str | None:
    if not trial.traits.is_shift_invariant:
        return None
    in_group = trial.batch.group_ids == trial.batch.group_ids[0]
    # On the last sampled token, so that it is part of every reward-to-go; in a row without one, anywhere.
    last = (trial.batch.response_mask * torch.arange(1, trial.batch.response_mask.shape[1] + 1)).argmax(
        dim=-1
    )
    rewards = trial.batch.token_level_rewards.clone()
    rewards[in_group, last[in_group]] += 4.0
    parts = torch.where(in_group[:, None], trial.batch.reward_parts + 4.0, trial.batch.reward_parts)
    shifted = replace(trial.batch, token_level_rewards=rewards, reward_parts=parts)
    return _difference(
        trial.estimate(shifted), trial.estimate(trial.batch), "4 added to every reward of one prompt"
    )


def _scales_as_claimed(trial: Trial) -> str | None:
    if trial.traits.scaling == "none":
        return None
    scaled = replace(
        trial.batch,
        **{
            name: 4.0 * getattr(trial.batch, name)
            for name in (
                "token_level_rewards",
                "values",
                "reward_baselines",
                "reward_parts",
                "process_rewards",
            )
        },
    )
    expected = trial.estimate(trial.batch) * (4.0 if trial.traits.scaling == "linear" else 1.0)
    return _difference(trial.estimate(scaled), expected, "rewards times 4", SCALE_TOLERANCE)


def _keeps_prompts_apart(trial: Trial) -> str | None:
    if trial.traits.is_batch_wide:
        return None
    other = random_batch(trial.generator, like=trial.batch)
    joined = Batch(
        **{
            name: torch.cat([getattr(trial.batch, name), getattr(other, name)])
            for name in trial.batch.__dataclass_fields__
        }
    )
    apart = torch.cat([trial.estimate(trial.batch), trial.estimate(other)])
    return _difference(trial.estimate(joined), apart, "other prompts in the same batch")


def _difference(got: Tensor, expected: Tensor, change: str, tolerance: float = TOLERANCE) -> str | None:
    """A sentence if the two differ by more than rounding, relative to the larger of 1 and the expected value."""
    apart = (got - expected).abs() > tolerance * expected.abs().clamp(min=1.0)
    if not apart.any():
        return None
    row, column = apart.nonzero()[0].tolist()
    return (
        f"with {change}, the advantage of row {row}, token {column} is {got[row, column].item():g} where "
        f"{expected[row, column].item():g} was expected"
    )


RULES: Mapping[str, Rule] = {
    "float64 and finite": _is_float64_and_finite,
    "inputs stay as they are": _writes_into_nothing,
    "zero outside the mask": _is_zero_outside_the_mask,
    "values outside the mask never matter": _ignores_values_outside_the_mask,
    "padding never matters": _ignores_padding,
    "the order of rows never matters": _follows_the_order_of_rows,
    "group ids are names": _takes_group_ids_as_names,
    "a reward counts wherever it sits": _counts_rewards_on_given_tokens,
    "a higher reward has the higher advantage": _prefers_higher_rewards,
    "a group of one has advantage 0": _gives_lone_samples_zero,
    "equal rewards give exactly 0": _gives_equal_rewards_zero,
    "a constant added to a group changes nothing": _ignores_a_constant,
    "rewards scale as claimed": _scales_as_claimed,
    "prompts do not see each other": _keeps_prompts_apart,
}
"""By the name that a finding carries."""
