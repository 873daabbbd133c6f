"""95 % confidence intervals of success probabilities and of mean rewards, in closed form and float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

_Z = NormalDist().inv_cdf(0.975)
"""Quantile of the normal distribution, either way."""


def wilson_interval(num_successes: float, num_trials: float) -> tuple[float, float]:
    """Ends of Wilson's score interval of a success probability; sensible at 0 %, at 100 % and for few trials.

    Counts may be fractional, e.g. a sum of per-prompt pass rates over the number of prompts. Several
    samples of one prompt are not independent: see `clustered_interval`.

    Raises:
        ValueError: no trials, or more successes than trials.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if not (num_trials > 0 and 0 <= num_successes <= num_trials):
        raise ValueError(f"{num_successes} successes in {num_trials} trials have no interval: count again")
    rate = num_successes / num_trials
    shrink = 1 + _Z**2 / num_trials
    center = (rate + _Z**2 / (2 * num_trials)) / shrink
    half = _Z * math.sqrt(rate * (1 - rate) / num_trials + (_Z / (2 * num_trials)) ** 2) / shrink
    low = 0.0 if num_successes == 0 else max(0.0, center - half)
    high = 1.0 if num_successes == num_trials else min(1.0, center + half)
    return low, high


def clustered_interval(successes: Sequence[float], trials: Sequence[float]) -> tuple[float, float]:
    """Wilson's interval of a success probability where the trials of one cluster (the answers to one prompt) are alike.

    The interval is that of n* = p (1 - p) / v independent trials, with v = sum_g (s_g - p n_g)^2 / n^2 the variance of
    the rate p = sum_g s_g / n between clusters: n* is n where each cluster has one trial, and the number of clusters
    where all trials of a cluster of equal size agree. A variance that few clusters show is itself unsure, so n* is
    multiplied by (t(n - 1) / t(G - 1))^2 (1 - 1/G) / (1 - 1/n), with G clusters and quantiles t of Student's
    distribution; but not below the number of clusters by that. It is at most n; at a rate of 0 or 1, where v says
    nothing, it is the number of clusters.

    Args:
        successes: s_g of each cluster; fractions are allowed.
        trials: n_g of each cluster.

    Raises:
        ValueError: as `wilson_interval`, or lists of different lengths.

    Source: clustered standard errors: Miller 2024, arXiv:2411.00640; the number of independent trials of
        the same variance in the interval of a proportion: Korn and Graubard 1998, Survey Methodology 24.
    """
    clusters = list(zip(successes, trials, strict=True))
    total, count = sum(successes), sum(trials)
    num_clusters = sum(n > 0 for n in trials)
    num_effective = float(num_clusters)
    if 0 < total < count:
        rate = total / count
        squares = sum((s - rate * n) ** 2 for s, n in clusters)
        alike = rate * (1 - rate) * count**2 / squares if squares else float(count)
        sure = alike * _variance_weight(num_clusters, count)
        num_effective = min(count, max(sure, min(alike, num_clusters)))
        total = rate * num_effective
    elif total == count:
        total = num_effective
    return wilson_interval(total, num_effective)


def mean_interval(totals: Sequence[float], counts: Sequence[float]) -> tuple[float, float] | None:
    """Interval of a mean of numbers of any size, where those of one cluster (the answers to one prompt) are alike.

    m -+ t sqrt(v), with m = sum_g s_g / n, the variance v = G / (G - 1) sum_g (s_g - m n_g)^2 / n^2 of m between G
    clusters, and the quantile t of Student's distribution with G - 1 degrees of freedom.

    Args:
        totals: s_g, the sum of the numbers of each cluster.
        counts: n_g, how many these are; clusters without any are left out.

    Returns:
        Its ends; None where nothing shows how the numbers spread: fewer than two clusters, or none that differ.

    Raises:
        ValueError: lists of different lengths.

    Source: clustered standard errors: Miller 2024, arXiv:2411.00640, section 2.2, with G / (G - 1) for few clusters:
        Cameron and Miller 2015, Journal of Human Resources 50, section II.B, and their quantile, section VI.D.
    """
    clusters = [(s, n) for s, n in zip(totals, counts, strict=True) if n > 0]
    if len(clusters) < 2:
        return None
    count = sum(n for _, n in clusters)
    mean = math.fsum(s for s, _ in clusters) / count
    squares = math.fsum((s - mean * n) ** 2 for s, n in clusters)
    error = math.sqrt(len(clusters) / (len(clusters) - 1) * squares) / count
    if error <= 1e-12 * abs(mean):  # the rounding of equal numbers
        return None
    half = student_quantile(len(clusters) - 1) * error
    return mean - half, mean + half


def _variance_weight(num_clusters: int, num_trials: float) -> float:
    """Factor by which a variance of so many clusters is worth less than one of so many trials; 1 where they are as
    many."""
    if num_clusters < 2 or num_clusters >= num_trials:
        return 1.0
    few, many = (student_quantile(n - 1) for n in (num_clusters, num_trials))
    return (many / few) ** 2 * (1 - 1 / num_clusters) / (1 - 1 / num_trials)


def student_quantile(freedom: float) -> float:
    """The t that Student's distribution of these degrees of freedom exceeds, either way, with probability 0.05.

    Exact for 1 and 2; otherwise an expansion whose error is below 0.8 % from 3 on and 0.1 % from 5 on.

    Source: Abramowitz and Stegun 1964, 26.7.5.
    """
    if freedom <= 1:
        return math.tan(math.pi * 0.95 / 2)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    terms = (
        (_Z**3 + _Z) / 4,
        (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96,
        (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384,
        (79 * _Z**9 + 776 * _Z**7 + 1482 * _Z**5 - 1920 * _Z**3 - 945 * _Z) / 92160,
    )
    return _Z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))
