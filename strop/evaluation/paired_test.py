"""Paired comparison of two models on the same prompts: differences by prompt, their interval and their test.

The answers to one prompt are alike, and a hard prompt is hard for both models. So the unit is the prompt: d_g, the
difference of both models' pass rates on it. All arithmetic is float64; draws follow from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_NUM_DRAWS = 10_000
_MAX_EXACT = 14
"""Prompts that differ of which all 2^n assignments of signs are counted."""
_CHUNK = 1 << 22
_CONFIDENCE = 0.95
_POWER = 0.8


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """Difference between the second model and the first."""

    difference: float
    """Mean over the prompts of the second pass rate, or mean reward, less the first."""
    low: float
    high: float
    """95 % interval: percentiles of the bootstrap over prompts."""
    p_value: float
    """Chance of a difference at least as large, either way, if neither model were better on any prompt: signs of the
    prompts' differences drawn at random."""
    num_prompts: int
    num_differing: int
    """Prompts on which these are not the same."""
    detectable: float | None
    """Difference that this many prompts would show with a chance of 80 %; None where no two prompts differ."""
    prompts_needed: int | None
    """Prompts of this kind that would show the difference found with a chance of 80 %; None for no difference."""


def compare_known(
    first: Sequence[float | None], second: Sequence[float | None], *, are_rates: bool
) -> PairedComparison | None:
    """Compare the prompts on which both have a number; None where there is no such prompt."""
    pairs = [
        (first_value, second_value)
        for first_value, second_value in zip(first, second, strict=True)
        if first_value is not None and second_value is not None
    ]
    if not pairs:
        return None
    return compare_paired(
        [first_value for first_value, _ in pairs],
        [second_value for _, second_value in pairs],
        are_rates=are_rates,
    )


def compare_paired(
    first: Sequence[float], second: Sequence[float], *, are_rates: bool = True, seed: int = 0
) -> PairedComparison:
    """Compare pass rates, or mean rewards, by prompt, in the same order.

    Where every prompt has the same difference, the bootstrap has nothing to draw from; the interval then is widened by
    the largest share of prompts with another one that would stay unseen with a chance of 2.5 %; of rewards, whose size
    has no bound, it is that difference alone.

    Raises:
        ValueError: lengths differ, or there is no prompt.

    Source: clustering by prompt and paired differences: Miller 2024, arXiv:2411.00640, sections 2.2 and 4; percentiles
        of the bootstrap: Efron and Tibshirani 1993, chapter 13; random signs: Fisher 1935, The Design of Experiments,
        section 21.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(
            f"{len(first)} and {len(second)} prompts cannot be compared: give the same ones, at least one"
        )
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    count, mean = len(differences), math.fsum(differences) / len(differences)
    random = np.random.default_rng(seed)
    spread = float(differences.std(ddof=1)) if count > 1 else 0.0
    if spread > 0:
        low, high = _bootstrap(differences, random)
    elif not are_rates:
        low = high = mean
    else:
        unseen = 1 - ((1 - _CONFIDENCE) / 2) ** (1 / count)
        low, high = max(-1.0, mean - unseen), min(1.0, mean + unseen)
    normal = NormalDist()
    reach = normal.inv_cdf((1 + _CONFIDENCE) / 2) + normal.inv_cdf(_POWER)
    return PairedComparison(
        difference=mean,
        low=low,
        high=high,
        p_value=_p_value(differences, random),
        num_prompts=count,
        num_differing=int(np.count_nonzero(differences)),
        detectable=reach * spread / math.sqrt(count) if spread else None,
        prompts_needed=math.ceil((reach * spread / mean) ** 2) if mean and spread else None,
    )


def _bootstrap(differences: np.ndarray, random: np.random.Generator) -> tuple[float, float]:
    """Percentiles of the mean of as many prompts, drawn with replacement."""
    count = len(differences)
    means = np.empty(_NUM_DRAWS)
    step = max(1, _CHUNK // count)
    for start in range(0, _NUM_DRAWS, step):
        drawn = random.integers(count, size=(min(step, _NUM_DRAWS - start), count))
        means[start : start + len(drawn)] = differences[drawn].mean(axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _p_value(differences: np.ndarray, random: np.random.Generator) -> float:
    """Of the sum of the differences; exact where few of them are not 0."""
    sizes = np.abs(differences[differences != 0])
    count = len(sizes)
    if not count:
        return 1.0
    reached = abs(float(differences.sum())) * (1 - 1e-12)  # sums in another order are the same sum
    if count <= _MAX_EXACT:
        signs = 1 - 2 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
        return float((np.abs(signs @ sizes) >= reached).mean())
    extreme = 0
    step = max(1, _CHUNK // count)
    for start in range(0, _NUM_DRAWS, step):
        signs = 1 - 2 * random.integers(2, size=(min(step, _NUM_DRAWS - start), count))
        extreme += int((np.abs(signs @ sizes) >= reached).sum())
    return (extreme + 1) / (_NUM_DRAWS + 1)
