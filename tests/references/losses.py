"""Per-token losses, KL estimators and the five reductions as loops over Python floats."""

from __future__ import annotations

import math


def clipped_term(
    log_prob: float, old: float, advantage: float, clip_low: float, clip_high: float, clip_c: float
) -> tuple[float, bool, bool]:
    """One token of the clipped surrogate: term, whether the clip won, whether the cap won."""
    ratio = math.exp(max(-20.0, min(20.0, log_prob - old)))
    unclipped = ratio * advantage
    bounded = max(1 - clip_low, min(1 + clip_high, ratio)) * advantage
    objective = min(unclipped, bounded)
    capped = advantage < 0 and objective < clip_c * advantage
    if capped:
        objective = clip_c * advantage
    return -objective, bounded < unclipped, capped


def kl(log_prob: float, ref: float, kind: str) -> float:
    """Schulman's note: with r = p_ref / p, k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r."""
    log_r = ref - log_prob
    if kind in ("k1", "kl"):
        return -log_r
    if kind == "abs":
        return abs(log_r)
    if kind in ("k2", "mse"):
        return log_r**2 / 2
    log_r = max(-20.0, min(20.0, log_r))
    return max(-10.0, min(10.0, math.exp(log_r) - 1 - log_r))


def reduce_terms(
    rows: list[list[float]], mask: list[list[int]], mode: str, scale: float | None = None
) -> float:
    """The loss of a whole optimizer batch, read off each mode's name."""
    kept = [[x for x, m in zip(xs, ms, strict=True) if m] for xs, ms in zip(rows, mask, strict=True)]
    kept = [row for row in kept if row]
    if mode == "token-mean":
        return math.fsum(x for row in kept for x in row) / sum(len(row) for row in kept)
    if mode == "token-sum":
        return math.fsum(x for row in kept for x in row)
    if mode == "seq-mean-token-sum":
        return math.fsum(math.fsum(row) for row in kept) / len(kept)
    if mode == "seq-mean-token-sum-norm":
        assert scale is not None
        return math.fsum(math.fsum(row) / scale for row in kept) / len(kept)
    assert mode == "seq-mean-token-mean"
    return math.fsum(math.fsum(row) / len(row) for row in kept) / len(kept)
