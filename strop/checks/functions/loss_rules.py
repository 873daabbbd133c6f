"""The rules that a policy loss is held to, one function each: a Finding, or None for a rule that is kept."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from strop.algorithms.aggregation import batch_totals, token_weights
from strop.algorithms.names import AGGREGATION_MODES
from strop.checks.functions.findings import Finding
from strop.checks.functions.loss_probe import (
    ATOL,
    RTOL,
    LossBatch,
    ProbedLoss,
    Seen,
    example_batch,
    gap_between,
)

EXTREME_LOG_RATIOS = (50.0, -50.0, 200.0, -200.0)
"""Log-ratios far outside what training sees on purpose, and inside what one broken batch can show."""
EXTREME_GRADIENT = 1e12
"""Far above any gradient of a log-ratio clamped to +-20 on the check's batch (e^20 = 5e8)."""
GARBAGE = 7.25
"""What stands outside the mask, where nothing may be read; finite, as a NaN would also show in harmless sums."""


def check_detached(loss: ProbedLoss, batch: LossBatch) -> list[Finding]:
    """Statistics are logged, so they must not hold the graph."""
    if loss.declaration.is_user_convention:
        return []
    log_probs = batch.columns["log_probs"].clone().requires_grad_()
    got = loss.terms({**batch.columns, "log_probs": log_probs}, batch.mask)
    return [
        Finding("statistics", f"statistic {name} carries a gradient, which keeps the graph alive: detach it")
        for name, values in got.statistics.items()
        if values.requires_grad
    ]


def check_inputs(batch: LossBatch, before: LossBatch) -> Finding | None:
    changed = [key for key, column in batch.columns.items() if not torch.equal(column, before.columns[key])]
    if not torch.equal(batch.mask, before.mask):
        changed.append("response_mask")
    if not changed:
        return None
    return Finding("inputs", f"it writes into the columns it is given: {', '.join(changed)} changed")


def check_repeats(loss: ProbedLoss, batch: LossBatch, base: Seen) -> Finding | None:
    difference = gap_between(base, loss.whole(batch))
    if difference is None:
        return None
    return Finding("repeatable", f"called twice on the same numbers, it differs: {difference}")


def check_mask(loss: ProbedLoss, batch: LossBatch, base: Seen) -> Finding | None:
    outside = base.gradient[~batch.mask].abs().max()
    if outside > ATOL:
        return Finding(
            "outside the mask", f"tokens outside the mask have a gradient, of up to {float(outside):.3g}"
        )
    filled = {
        key: torch.where(batch.mask, column, torch.full_like(column, GARBAGE))
        for key, column in batch.columns.items()
        if column.is_floating_point()
    }
    seen = loss.seen(batch.replaced(**filled))
    difference = gap_between(base, seen)
    if difference is None:
        return None
    return Finding(
        "outside the mask",
        f"depends on values outside the mask: with {GARBAGE} there in place of 0, {difference}",
    )


def check_width(loss: ProbedLoss, batch: LossBatch, base: Seen) -> Finding | None:
    seen = loss.seen(batch.widened(3))
    difference = gap_between(base, Seen(seen.loss, seen.gradient[:, : batch.mask.shape[1]]))
    if difference is None:
        return None
    return Finding("padding width", f"changes with the padding: with 3 more positions of it, {difference}")


def check_order(loss: ProbedLoss, example: LossBatch, base: Seen) -> Finding | None:
    order = torch.tensor([3, 0, 4, 2, 1])
    seen = loss.whole(example.rows(order))
    difference = gap_between(Seen(base.loss, base.gradient[order]), seen)
    if difference is None:
        return None
    return Finding("order of rows", f"changes with the order of the responses: {difference}")


def check_cut(loss: ProbedLoss, batch: LossBatch, base: Seen) -> Finding | None:
    totals = batch_totals(batch.mask)
    parts = [
        loss.seen(batch.rows(index), totals) for index in (torch.tensor([0, 1]), torch.tensor([2, 3, 4]))
    ]
    joined = Seen(sum(part.loss for part in parts), torch.cat([part.gradient for part in parts]))
    difference = gap_between(base, joined)
    if difference is None:
        return None
    remedy = (
        "reduce it with agg_loss(..., **config.global_batch_info)"
        if loss.declaration.is_user_convention
        else "compute what concerns the whole batch in prepare"
    )
    return Finding(
        "cut of the batch",
        f"changes with how the batch is cut: for two and three responses in two calls, {difference}; {remedy}",
    )


def check_empty_row(loss: ProbedLoss, batch: LossBatch, base: Seen) -> Finding | None:
    def add(column: Tensor) -> Tensor:
        return torch.cat([column, torch.zeros_like(column[:1])])

    more = LossBatch({key: add(column) for key, column in batch.columns.items()}, add(batch.mask))
    seen = loss.seen(more)
    difference = gap_between(base, Seen(seen.loss, seen.gradient[:-1]))
    if difference is None:
        return None
    return Finding("empty row", f"changes with one more response without a token to train on: {difference}")


def check_layout(loss: ProbedLoss, batch: LossBatch, base: Seen) -> Finding | None:
    """Rows end to end must give the terms that padded rows give."""
    if loss.declaration.is_user_convention:
        return None
    width = torch.arange(batch.mask.shape[1])
    lengths = torch.where(batch.mask, width + 1, 0).amax(dim=1)  # [B]
    present = width < lengths[:, None]  # [B, R]
    columns = {key: column[present] for key, column in batch.columns.items()}
    columns["row_ids"] = torch.arange(len(lengths)).repeat_interleave(lengths)
    mask = batch.mask[present]
    try:
        flat = loss.terms(columns, mask).terms
    except ValueError as error:
        return Finding("layout", f"flat columns [N] do not give one term per token: {error}")
    padded = loss.terms(batch.columns, batch.mask).terms[present]
    gap = (flat - padded)[mask].abs().max()
    if gap <= ATOL + RTOL * padded[mask].abs().max():
        return None
    return Finding(
        "layout", f"flat columns [N] give other terms than padded ones [B, R], by up to {float(gap):.3g}"
    )


def check_zero_advantage(loss: ProbedLoss, seed: int) -> Finding | None:
    if loss.declaration.moves_without_advantage:
        return None
    batch = example_batch(seed + 1)
    zeros = batch.replaced(advantages=torch.zeros_like(batch.columns["advantages"]))
    largest = float(loss.whole(zeros).gradient.abs().max())
    if largest <= ATOL:
        return None
    return Finding(
        "zero advantage",
        f"gradient not zero at zero advantage: up to {largest:.3g}. A loss with a penalty of its own declares "
        f"moves_without_advantage=True; otherwise samples that teach nothing move the policy",
    )


def check_on_policy(loss: ProbedLoss, seed: int) -> Finding | None:
    """At log_probs == old_log_probs the gradient is that of REINFORCE, up to one constant, in some mode."""
    batch = example_batch(seed + 2, on_policy=True)
    seen, mask = loss.whole(batch), batch.mask
    totals = batch_totals(mask)
    kept = mask & (seen.gradient != 0) if loss.declaration.prepare is not None else mask
    closest: Tensor | None = None
    for mode in (loss.mode, *AGGREGATION_MODES):
        if mode == "seq-mean-token-sum-norm":
            continue  # a constant times seq-mean-token-sum
        weights = token_weights(
            mode, mask, num_tokens=totals.num_tokens, num_samples=totals.num_samples, dtype=torch.float64
        )
        factors = (seen.gradient / (-batch.columns["advantages"] * weights))[kept]
        if factors.numel() and factors.min() > 0 and factors.max() - factors.min() <= 1e-6 * factors.max():
            return None
        closest = factors if closest is None else closest
    if closest is None or not closest.numel() or not closest.any():
        return Finding(
            "on-policy", "no gradient where log_probs equal old_log_probs: nothing is ever learned"
        )
    low, high = float(closest.min()) + 0.0, float(closest.max()) + 0.0  # a 0 has no sign
    meaning = (
        "a negative one pushes the policy away from rewarded answers"
        if low < 0
        else "one constant for all tokens is expected"
    )
    return Finding(
        "on-policy",
        f"where log_probs equal old_log_probs, the gradient is {low:.4g} to {high:.4g} times that of REINFORCE "
        f"(-advantage * weight of the token): {meaning}",
    )


def check_extremes(loss: ProbedLoss) -> Finding | None:
    batch = example_batch(seed=0).to(torch.float32)
    mask = batch.mask
    for log_ratio in EXTREME_LOG_RATIOS:
        low, high = torch.full(mask.shape, -0.5 - abs(log_ratio)), torch.full(mask.shape, -0.5)
        new, old = (high, low) if log_ratio > 0 else (low, high)
        extreme = batch.replaced(
            log_probs=torch.where(mask, new, 0.0), old_log_probs=torch.where(mask, old, 0.0)
        )
        seen = loss.whole(extreme)
        largest = float(seen.gradient.abs().max())
        if torch.isfinite(seen.gradient).all() and abs(seen.loss) < EXTREME_GRADIENT > largest:
            continue
        return Finding(
            "extreme log-ratio",
            f"not finite, or out of hand, at log-ratio {log_ratio:g} in float32: the loss is {seen.loss:.3g} and its "
            f"largest gradient {largest:.3g}; clamp the log-ratio to +-20 before its exponential",
        )
    return None


def check_importance_weights(loss: ProbedLoss, batch: LossBatch, base: Seen) -> Finding | None:
    """A loss of verl's convention multiplies its terms by the weights of the rollout correction itself."""
    if not loss.declaration.is_user_convention:
        return None
    if "rollout_is_weights" not in inspect.signature(loss.function).parameters:
        return None
    weights = torch.where(batch.mask, torch.full_like(batch.columns["advantages"], 0.5), 0.0)
    seen = loss.seen(batch.replaced(rollout_is_weights=weights))
    if gap_between(base, seen) is not None:
        return None
    return Finding(
        "importance weights",
        f"rollout_is_weights is a parameter, but weights of 0.5 change nothing: the loss stays {base.loss:.6g}",
    )
