"""The contract of advantage estimators.

`check_adv_estimator` makes small batches in float64 from a seed, tries every rule of estimator_rules.py on each, and
reports the rules that are broken, with the numbers that show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

import torch
from algorithms.contract.estimator_batches import Batch, random_batch
from algorithms.contract.estimator_rules import RULES, EstimatorTraits, Trial
from algorithms.contract.findings import Finding
from torch import Tensor

from strop.algorithms.advantages import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageFn,
    call_estimator,
    get_adv_estimator_fn,
)
from strop.algorithms.registry import Declaration
from strop.algorithms.specs import adv_estimator_declaration
from strop.cli.check_functions.estimators import inferred_declaration
from strop.utils.registry import name_of

SHARED_DEFAULTS: Mapping[str, object] = {"norm_by_std": True, "gamma": 0.9, "lam": 0.8}
"""Shared settings unless others are given; below 1, so that a forgotten discount shows."""
FAILURES_OF_A_FUNCTION = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What wrong shapes, names and numbers raise."""

_SHIFTED = EstimatorTraits(compares_groups=True, is_shift_invariant=True, scaling="linear")
_NORMALIZED = replace(_SHIFTED, scaling="invariant")

TRAITS: Mapping[str, EstimatorTraits] = {
    "dr_grpo": _SHIFTED,
    "gae": EstimatorTraits(is_batch_wide=True, scaling="invariant"),
    "gdpo": replace(_NORMALIZED, is_batch_wide=True),
    "gigpo": replace(_NORMALIZED, is_shift_invariant=False),
    "gpg": EstimatorTraits(compares_groups=True, is_batch_wide=True, scaling="linear"),
    "grpo": _NORMALIZED,
    "grpo_passk": _NORMALIZED,
    "grpo_vectorized": _NORMALIZED,
    "maxrl": EstimatorTraits(compares_groups=True, scaling="invariant"),
    "opo": _SHIFTED,
    "optimal_token_baseline": _SHIFTED,
    "prime": replace(_SHIFTED, is_batch_wide=True, scaling="none"),
    "raft": EstimatorTraits(ignores_rewards=True, is_shift_invariant=True, scaling="invariant"),
    "reinforce_plus_plus": EstimatorTraits(is_batch_wide=True, scaling="invariant"),
    "reinforce_plus_plus_baseline": replace(_NORMALIZED, is_batch_wide=True),
    "remax": EstimatorTraits(scaling="linear"),
    "rloo": _SHIFTED,
    "rloo_vectorized": _SHIFTED,
    "tir_optimal_token_baseline": _SHIFTED,
}
"""Of every estimator that ships. Alpha of gpg counts rewards that are not 0, so a shift changes it."""


def check_adv_estimator(
    estimator: str | Enum | AdvantageFn,
    *,
    traits: EstimatorTraits | None = None,
    declaration: Declaration | None = None,
    settings: Mapping[str, object] | None = None,
    seed: int = 0,
    num_batches: int = 8,
) -> list[Finding]:
    """Rules that the estimator breaks, each at most once, with the first batch that shows it; none: it keeps all.

    Args:
        estimator: a registered name, or a function (registered or not).
        traits: what is claimed of it; not given: `TRAITS` of its name, else of its declaration.
        declaration: columns and settings of a function that is not registered; not given: its signature says
            whether it takes columns of ours by keyword, or follows verl's calling convention.
        settings: by name, as in `estimate_advantages`; the shared ones default to `SHARED_DEFAULTS`.
        seed: of the batches.
        num_batches: how many to try; their shapes differ.

    Raises:
        ValueError: an unknown name.
    """
    name, function, declaration = _resolve(estimator, declaration)
    claims = traits or TRAITS.get(name) or EstimatorTraits(compares_groups=declaration.is_group_relative)
    numbers = {**SHARED_DEFAULTS, **(settings or {})}

    def estimate(batch: Batch) -> Tensor:
        return call_estimator(name, function, declaration, columns=batch.columns(), settings=numbers)[0]

    findings: dict[str, Finding] = {}
    for number in range(num_batches):
        generator = torch.Generator().manual_seed(seed * num_batches + number)
        trial = Trial(estimate=estimate, batch=random_batch(generator), traits=claims, generator=generator)
        for rule, broken_by in RULES.items():
            if rule in findings:
                continue
            # What the function raises is a finding, not our failure.
            try:
                sentence = broken_by(trial)
            except FAILURES_OF_A_FUNCTION as error:
                findings["it runs"] = Finding("it runs", f"{name} raised {type(error).__name__}: {error}")
                return list(findings.values())
            if sentence is not None:
                findings[rule] = Finding(rule, f"{name}: {sentence}")
    return list(findings.values())


def _resolve(
    estimator: str | Enum | AdvantageFn, declaration: Declaration | None
) -> tuple[str, AdvantageFn, Declaration]:
    """Name, function and declaration of what is to be checked."""
    if isinstance(estimator, str | Enum):
        return name_of(estimator), get_adv_estimator_fn(estimator), adv_estimator_declaration(estimator)
    if declaration is None:
        for name, function in ADV_ESTIMATOR_REGISTRY.items():
            if function is estimator:
                return name, function, adv_estimator_declaration(name)
    name = getattr(estimator, "__name__", repr(estimator))
    return name, estimator, declaration or inferred_declaration(estimator)
