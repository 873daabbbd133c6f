"""Every estimator against slow loops written from the papers, in float64 at 1e-10."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import advantages as reference
from references import critics
from strop.algorithms.advantages import estimate_advantages
from strop.cli.check_functions.estimators import TRAITS

EXACT = {"rtol": 0.0, "atol": 1e-10}
Rows = list[list[float]]
GAMMA, LAM = 0.9, 0.7


@dataclass
class Case:
    """Columns as lists. Rewards are eighths, so that equal totals are equal in floating point; they may sit on
    given tokens."""

    rewards: Rows
    groups: list[int]
    mask: list[list[int]]
    values: Rows
    log_probs: Rows
    squares: Rows
    weights: Rows
    baselines: list[float]
    parts: Rows
    process: Rows
    steps: list[tuple[int, int]]
    """Of each row the episode and the answer's place in it, from 0 without a gap."""
    anchors: list[int]

    @property
    def totals(self) -> list[float]:
        return [math.fsum(row) for row in self.rewards]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_rows, width = draw(st.integers(2, 6)), draw(st.integers(1, 4))

    def rows(numbers: list[float], columns: int) -> Rows:
        return [[draw(st.sampled_from(numbers)) for _ in range(columns)] for _ in range(num_rows)]

    mask = [[1] + [draw(st.integers(0, 1)) for _ in range(width - 1)] for _ in range(num_rows)]
    groups = [draw(st.integers(3, 5)) for _ in range(num_rows)]
    groups[1] = groups[0]
    steps: list[tuple[int, int]] = []
    for group in groups:
        sample = draw(st.integers(0, 2))
        before = [n for n, one in enumerate(steps) if groups[n] == group and one[0] == sample]
        steps.append((sample, len(before)))
    return Case(
        rewards=rows([0.0, 0.125, 0.5, 1.0, 3.25], width),
        groups=groups,
        mask=mask,
        values=rows([0.0, 0.3, 1.5], width),
        log_probs=rows([-0.1, -1.0, -3.0], width),
        squares=rows([0.05, 0.4, 0.9], width),
        weights=rows([0.5, 1.0, 2.0], width),
        baselines=[row[0] for row in rows([0.0, 0.25, 1.0], 1)],
        parts=rows([0.0, 0.1, 1.0, 7.0], 3),
        process=rows([0.0, 0.1, -0.4, 0.7], width),
        steps=steps,
        anchors=[draw(st.integers(-1, 1)) for _ in groups],
    )


def expected(name: str, case: Case, variant: bool) -> Rows:
    """By the reference; `variant` turns the one switch of the estimator, if it has one."""
    outcome = case.totals, case.groups, case.mask
    match name:
        case "grpo" | "grpo_vectorized":
            return reference.grpo(*outcome, variant)
        case "dr_grpo":
            return reference.grpo(*outcome, False)
        case "grpo_passk":
            return reference.grpo_passk(*outcome, variant)
        case "rloo" | "rloo_vectorized":
            return reference.rloo(*outcome)
        case "opo":
            return reference.opo(*outcome)
        case "gpg":
            return reference.gpg(*outcome, 0.5, variant)
        case "maxrl":
            return reference.maxrl(*outcome)
        case "reinforce_plus_plus_baseline":
            return reference.reinforce_plus_plus_baseline(*outcome)
        case "gdpo":
            weights = [1.0, 0.5, 3.0] if variant else [1.0, 1.0, 1.0]
            return reference.gdpo(case.parts, case.groups, case.mask, weights)
        case "gigpo":
            samples, turns = [list(column) for column in zip(*case.steps, strict=True)]
            return reference.gigpo(
                case.totals, samples, turns, case.anchors, case.groups, case.mask, variant, GAMMA, 0.5
            )
        case "reinforce_plus_plus":
            return reference.whiten(reference.reward_to_go(case.rewards, case.mask, GAMMA), case.mask)
        case "gae":
            plain = critics.gae(case.rewards, case.values, case.mask, GAMMA, LAM)
            return reference.whiten(plain, case.mask)
        case "raft":
            return [[float(kept) for kept in row] for row in case.mask]
        case "prime":
            numbers = (0.5, 3.0, False, False) if variant else (1.0, 1.0, True, True)
            return reference.prime(*outcome, case.process, GAMMA, *numbers)
        case "remax":
            return reference.remax(case.rewards, case.baselines, case.mask)
        case "optimal_token_baseline" | "tir_optimal_token_baseline":
            return reference.optimal_token_baseline(
                case.rewards, case.groups, case.mask, case.log_probs, case.squares,
                case.weights if variant else None, name.startswith("tir"), variant,
            )  # fmt: skip
    raise AssertionError(f"{name} has no reference")


SWITCHES: dict[str, tuple[str, object, object]] = {
    "grpo": ("norm_by_std", False, True),
    "grpo_vectorized": ("norm_by_std", False, True),
    "grpo_passk": ("norm_by_std", False, True),
    "gpg": ("count_mixed_groups", False, True),
    "gigpo": ("norm_by_std", False, True),
    "gdpo": ("reward_weights", (), (1.0, 0.5, 3.0)),
    "optimal_token_baseline": ("handle_zero_tail", False, True),
    "tir_optimal_token_baseline": ("handle_zero_tail", False, True),
}


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def estimated(name: str, case: Case, variant: bool) -> Tensor:
    numbers: dict[str, object] = {"gamma": GAMMA, "lam": LAM, "f_norm": 0.5, "step_weight": 0.5}
    if name in SWITCHES:
        switch, off, on = SWITCHES[name]
        numbers[switch] = on if variant else off
    if name == "prime" and variant:
        numbers |= {"process_weight": 0.5, "outcome_weight": 3.0, "process_norm": False, "whiten": False}
    columns = {
        "values": double(case.values),
        "old_log_probs": double(case.log_probs),
        "sum_pi_squared": double(case.squares),
        "reward_baselines": double(case.baselines),
        "reward_parts": double(case.parts),
        "process_rewards": double(case.process),
        "turn_rewards": double(case.totals),
        "sample_index": torch.tensor([sample for sample, _ in case.steps]),
        "turn_index": torch.tensor([turn for _, turn in case.steps]),
        "anchor_ids": torch.tensor(case.anchors),
    }
    if variant:
        columns["rollout_is_weights"] = double(case.weights)
    return estimate_advantages(
        name,
        token_level_rewards=double(case.rewards),
        response_mask=torch.tensor(case.mask),
        group_ids=torch.tensor(case.groups),
        settings=numbers,
        columns=columns,
    )[0]


@pytest.mark.parametrize("name", sorted(TRAITS))
@given(case=cases(), variant=st.booleans())
@settings(max_examples=15, deadline=None)
def test_estimators_equal_the_slow_reference(name: str, case: Case, variant: bool) -> None:
    wanted = double(expected(name, case, variant))
    got = estimated(name, case, variant)
    # Values that should be equal differ by 1e-16, which whitening magnifies where the variance is near 0.
    tolerance = {"rtol": 0.0, "atol": 1e-9} if TRAITS[name].is_batch_wide else EXACT
    torch.testing.assert_close(got, wanted, **tolerance)
