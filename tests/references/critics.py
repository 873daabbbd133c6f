"""GAE, the clipped value loss, and what goes with a critic, as loops over Python floats."""

from __future__ import annotations

import math


def gae(
    rewards: list[list[float]], values: list[list[float]], mask: list[list[int]], gamma: float, lam: float
) -> list[list[float]]:
    """Schulman et al. 2016, eq. 16, as the sum it is: A_k = sum_j (gamma lam)^(j - k) delta_j over later tokens.

    Each row is first reduced to its sampled tokens; the reward of a given token goes to the sampled one before it.
    """
    out = []
    for row_rewards, row_values, row_mask in zip(rewards, values, mask, strict=True):
        places = [t for t, sampled in enumerate(row_mask) if sampled]
        credit = [0.0] * len(places)
        for t, reward in enumerate(row_rewards):
            before = [k for k, place in enumerate(places) if place <= t]
            if before:
                credit[before[-1]] += reward
        v = [row_values[place] for place in places] + [0.0]
        deltas = [credit[k] + gamma * v[k + 1] - v[k] for k in range(len(places))]
        row = [0.0] * len(row_mask)
        for k, place in enumerate(places):
            row[place] = math.fsum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(places)))
        out.append(row)
    return out


def value_term(value: float, old: float, target: float, clip_range: float) -> tuple[float, bool]:
    """One token of the value loss, and whether the clipped error won."""
    bounded = max(old - clip_range, min(old + clip_range, value))
    plain, clipped = (value - target) ** 2, (bounded - target) ** 2
    return max(plain, clipped) / 2, clipped > plain


def explained_variance(values: list[float], returns: list[float]) -> float:
    """1 - var(returns - values) / var(returns), both divided by n."""
    errors = [g - v for g, v in zip(returns, values, strict=True)]

    def variance(numbers: list[float]) -> float:
        mean = math.fsum(numbers) / len(numbers)
        return math.fsum((x - mean) ** 2 for x in numbers) / len(numbers)

    return 1 - variance(errors) / variance(returns)


def adaptive_kl(coef: float, kls: list[float], target: float, horizon: int, num_samples: int) -> list[float]:
    """Ziegler et al. 2019, section 2.2: the coefficient after each step."""
    out = []
    for kl in kls:
        error = max(-0.2, min(0.2, (kl - target) / target))
        coef = coef * (1 + error * num_samples / horizon)
        out.append(coef)
    return out
