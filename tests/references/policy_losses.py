"""Policy losses as loops over Python floats, from the papers; gradients derived by hand.

A batch is a list of rows; a row is a list of tokens (log_prob, old_log_prob, advantage), all of them trained on.
Each loss gives, per token, the term and the derivative of the sum of all terms by the token's log_prob.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Token = tuple[float, float, float]
Row = list[Token]
Result = list[list[tuple[float, float]]]


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def ratio_of(log_prob: float, old: float) -> tuple[float, float]:
    """The ratio, and its derivative by log_prob: itself, or 0 where the log-ratio is out of bounds."""
    ratio = math.exp(clamp(log_prob - old, -20.0, 20.0))
    return ratio, (ratio if abs(log_prob - old) <= 20 else 0.0)


def vanilla(token: Token, *, low: float, high: float, c: float) -> tuple[float, float]:
    log_prob, old, a = token
    ratio, slope = ratio_of(log_prob, old)
    if a > 0:  # min(r A, clip(r) A)
        return (-a * (1 + high), 0.0) if ratio > 1 + high else (-a * ratio, -a * slope)
    if ratio < 1 - low:
        return -a * (1 - low), 0.0
    return (-a * c, 0.0) if ratio > c else (-a * ratio, -a * slope)


def surrogate(token: Token, *, low: float, high: float) -> tuple[float, float]:
    return vanilla(token, low=low, high=high, c=math.inf)


def cispo(token: Token, *, low: float, high: float) -> tuple[float, float]:
    log_prob, old, a = token
    weight = clamp(ratio_of(log_prob, old)[0], 1 - low, 1 + high)
    return -weight * a * log_prob, -weight * a


def dppo_tv(token: Token, *, low: float, high: float, truncation: float) -> tuple[float, float]:
    log_prob, old, a = token
    moved = math.exp(log_prob) - math.exp(old)
    if (a > 0 and moved > high) or (a <= 0 and -moved > low):
        return 0.0, 0.0
    weight = min(ratio_of(log_prob, old)[0], truncation)
    return -weight * a * log_prob, -weight * a


def dppo_kl(token: Token, *, low: float, high: float, truncation: float) -> tuple[float, float]:
    log_prob, old, a = token
    p, q = math.exp(log_prob), math.exp(old)
    kl = q * (old - log_prob) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    leaves = p > q if a > 0 else p < q
    if leaves and kl > (high if a > 0 else low):
        return 0.0, 0.0
    weight = min(ratio_of(log_prob, old)[0], truncation)
    return -weight * a * log_prob, -weight * a


def sapo(token: Token, *, tau_pos: float, tau_neg: float) -> tuple[float, float]:
    log_prob, old, a = token
    tau = tau_pos if a > 0 else tau_neg
    ratio, slope = ratio_of(log_prob, old)
    x = tau * (ratio - 1)
    gate = 1 / (1 + math.exp(-x)) if x < 700 else 1.0
    return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * slope


def dro(token: Token, *, beta: float) -> tuple[float, float]:
    log_prob, old, a = token
    moved = log_prob - old
    return -(a * log_prob - beta / 2 * moved**2), -(a - beta * moved)


def policy_gradient(token: Token) -> tuple[float, float]:
    log_prob, _, a = token
    return -a * log_prob, -a


def each_token(loss: Callable[[Token], tuple[float, float]], rows: list[Row]) -> Result:
    return [[loss(token) for token in row] for row in rows]


def gspo(rows: list[Row], *, low: float, high: float) -> Result:
    """s_i = (product of the ratios)^(1/|y_i|); min(s A_t, clip(s) A_t), the gradient through the token alone."""
    result: Result = []
    for row in rows:
        mean = math.fsum(log_prob - old for log_prob, old, _ in row) / max(len(row), 1)
        s = math.exp(clamp(mean, -20.0, 10.0))
        out = []
        for _, _, a in row:
            clipped = clamp(s, 1 - low, 1 + high)
            if min(s * a, clipped * a) == s * a and s != clipped:
                out.append((-s * a, -s * a if -20 <= mean <= 10 else 0.0))
            elif s == clipped:
                out.append((-s * a, -s * a))
            else:
                out.append((-clipped * a, 0.0))
        result.append(out)
    return result


def gmpo(rows: list[Row], *, low: float, high: float) -> Result:
    """Mean advantage times the geometric mean of the ratios, each clipped on the side its advantage pushes to."""
    result: Result = []
    for row in rows:
        logs, moves = [], []
        for log_prob, old, a in row:
            d = clamp(log_prob - old, -20.0, 20.0)
            c = 0.0 if a == 0 else min(d, high) if a > 0 else max(d, -low)
            logs.append(c)
            moves.append(a != 0 and c == log_prob - old)
        count = max(len(row), 1)
        value = -math.fsum(a for _, _, a in row) / count * math.exp(math.fsum(logs) / count)
        result.append([(value, value if move else 0.0) for move in moves])
    return result


def covariances(rows: list[Row]) -> list[float]:
    tokens = [token for row in rows for token in row]
    mean_log = math.fsum(log_prob for log_prob, _, _ in tokens) / len(tokens)
    mean_a = math.fsum(a for _, _, a in tokens) / len(tokens)
    return [(a - mean_a) * (log_prob - mean_log) for log_prob, _, a in tokens]


def kl_cov_choice(rows: list[Row], share: float) -> set[int]:
    """Numbers of the tokens, counted over the rows, of highest covariance."""
    values = covariances(rows)
    ranked = sorted(range(len(values)), key=lambda t: -values[t])
    return set(ranked[: max(int(share * len(values)), 1)])


def ppo_clips(token: Token, *, low: float, high: float) -> bool:
    ratio, a = ratio_of(token[0], token[1])[0], token[2]
    return (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)


def clip_cov_candidates(rows: list[Row], *, low: float, high: float, bounds: tuple[float, float]) -> set[int]:
    """Numbers of the tokens among which Clip-Cov draws."""
    tokens = [token for row in rows for token in row]
    values = covariances(rows)
    return {
        t
        for t, token in enumerate(tokens)
        if bounds[0] < values[t] < bounds[1] and not ppo_clips(token, low=low, high=high)
    }


def clip_cov(rows: list[Row], chosen: set[int], *, low: float, high: float) -> Result:
    numbers = iter(range(10**9))
    return [
        [(0.0, 0.0) if next(numbers) in chosen else surrogate(token, low=low, high=high) for token in row]
        for row in rows
    ]


def kl_cov(rows: list[Row], chosen: set[int], *, coef: float) -> Result:
    numbers = iter(range(10**9))
    result: Result = []
    for row in rows:
        out = []
        for log_prob, old, a in row:
            ratio, slope = ratio_of(log_prob, old)
            moved = log_prob - old
            sign = (moved > 1e-5) - (moved < -1e-5)  # less may be a rounding
            is_chosen = next(numbers) in chosen
            out.append(
                (-a * ratio + (coef * abs(moved) if is_chosen else 0), -a * slope + (coef * sign * is_chosen))
            )
        result.append(out)
    return result


def forward_kl(student: list[float], teacher: list[float], with_tail: bool) -> float:
    """KL(teacher || student) over the listed tokens, and over all others as one if asked."""
    total = math.fsum(math.exp(t) * (t - s) for s, t in zip(student, teacher, strict=True))
    if not with_tail:
        return total
    rest, teacher_rest = (1 - math.fsum(math.exp(x) for x in logs) for logs in (student, teacher))
    return total + teacher_rest * math.log(teacher_rest / rest)
