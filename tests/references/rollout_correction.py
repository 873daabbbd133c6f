"""Rollout correction as loops over Python floats, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Rows = Sequence[Sequence[float]]
Flags = Sequence[Sequence[bool]]


def _bounded(value: float) -> float:
    return max(-20.0, min(20.0, value))


def _log_ratios(old: Rows, rollout: Rows, mask: Flags) -> list[dict[int, float]]:
    """Per row: position -> log of the ratio, sampled tokens only."""
    return [
        {t: old[i][t] - rollout[i][t] for t in range(len(mask[i])) if mask[i][t]} for i in range(len(mask))
    ]


def _k(rho: float, kind: str) -> float:
    if kind == "k1":
        return -rho
    if kind == "k2":
        return rho * rho / 2
    rho = _bounded(rho)
    return math.exp(rho) - 1 - rho


def _row_value(values: list[float], level: str) -> float:
    if level == "seq_sum":
        return math.fsum(values)
    if level == "seq_mean":
        return math.fsum(values) / len(values)
    return max(values)


def kept(
    old: Rows, rollout: Rows, mask: Flags, reject: Mapping[str, float | tuple[float, float]]
) -> list[list[bool]]:
    """Tokens that every statistic keeps."""
    result = [list(map(bool, row)) for row in mask]
    for name, bound in reject.items():
        level, kind = name[:-3], name[-2:]
        for i, row in enumerate(_log_ratios(old, rollout, mask)):
            for t in row:
                own = [_k(row[t], kind)]
                value = _row_value(own if level == "token" else [_k(r, kind) for r in row.values()], level)
                if kind == "k1":
                    low, high = bound if isinstance(bound, tuple) else (1 / bound, bound)
                    is_kept = low <= math.exp(-value) <= high
                else:
                    assert not isinstance(bound, tuple)
                    is_kept = value <= bound
                result[i][t] = result[i][t] and is_kept
    return result


def weights(
    old: Rows,
    rollout: Rows,
    mask: Flags,
    trained: Flags,
    *,
    level: str,
    mode: str,
    lower: float,
    upper: float,
    normalize: bool,
) -> list[list[float]]:
    """The factor of each token; 0 where `trained` is false."""
    result = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(_log_ratios(old, rollout, mask)):
        for t, rho in row.items():
            if not trained[i][t]:
                continue
            log_ratio = {
                "token": rho,
                "sequence": math.fsum(row.values()),
                "geometric": math.fsum(row.values()) / len(row),
            }[level]
            ratio = math.exp(_bounded(log_ratio))
            if mode == "truncate":
                result[i][t] = min(ratio, upper)
            else:
                result[i][t] = ratio if lower <= ratio <= upper else 0.0
    if normalize:
        if level == "token":
            used = [w for i, row in enumerate(result) for t, w in enumerate(row) if trained[i][t]]
        else:
            used = [
                next(w for t, w in enumerate(row) if trained[i][t])
                for i, row in enumerate(result)
                if any(trained[i])
            ]
        mean = math.fsum(used) / len(used) if used else 0.0
        if mean > 0:
            result = [[w / mean for w in row] for row in result]
    return result


def effective_share(ratios: Sequence[float]) -> float:
    """Kish's effective sample size over the number of samples: (sum w)^2 / (n sum w^2)."""
    return math.fsum(ratios) ** 2 / (len(ratios) * math.fsum(w * w for w in ratios))
