"""Advantage estimators as loops over Python floats, written from their papers."""

from __future__ import annotations

import math


def grpo(
    rewards: list[float], groups: list[int], mask: list[list[int]], norm_by_std: bool, eps: float = 1e-6
) -> list[list[float]]:
    """Shao et al. 2024, section 4.1.2, with the sample standard deviation; Liu et al. 2025 without it."""
    out = []
    for reward, group, row in zip(rewards, groups, mask, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = math.fsum(peers) / len(peers)
        advantage = reward - mean
        if len(peers) == 1 or max(peers) == min(peers):
            advantage = 0.0
        elif norm_by_std:
            var = math.fsum((p - mean) ** 2 for p in peers) / (len(peers) - 1)
            advantage /= math.sqrt(var) + eps
        out.append([advantage if m else 0.0 for m in row])
    return out


def rloo(rewards: list[float], groups: list[int], mask: list[list[int]]) -> list[list[float]]:
    """Ahmadian et al. 2024, eq. 6: the baseline is the mean of the other samples."""
    out = []
    for i, row in enumerate(mask):
        others = [rewards[j] for j in range(len(rewards)) if j != i and groups[j] == groups[i]]
        advantage = rewards[i] - math.fsum(others) / len(others) if others else 0.0
        out.append([advantage if m else 0.0 for m in row])
    return out


def reward_to_go(rewards: list[list[float]], mask: list[list[int]], gamma: float) -> list[list[float]]:
    """Per sampled token t: sum over u >= t of r_u * gamma^(sampled tokens in t..u, not counting t).

    A reward on a token that was not sampled belongs to the last sampled token before it.
    """
    out = []
    for row_rewards, row_mask in zip(rewards, mask, strict=True):
        row = []
        for t, sampled in enumerate(row_mask):
            total, power = 0.0, 0
            for u in range(t, len(row_mask)):
                if u > t and row_mask[u]:
                    power += 1
                total += row_rewards[u] * gamma**power
            row.append(total if sampled else 0.0)
        out.append(row)
    return out


def whiten(values: list[list[float]], mask: list[list[int]]) -> list[list[float]]:
    """(v - mean) / sqrt(sample variance + 1e-8) over valid entries."""
    valid = [v for vs, ms in zip(values, mask, strict=True) for v, m in zip(vs, ms, strict=True) if m]
    mean = math.fsum(valid) / len(valid)
    var = math.fsum((v - mean) ** 2 for v in valid) / (len(valid) - 1)
    scale = math.sqrt(var + 1e-8)
    return [
        [(v - mean) / scale if m else 0.0 for v, m in zip(vs, ms, strict=True)]
        for vs, ms in zip(values, mask, strict=True)
    ]
