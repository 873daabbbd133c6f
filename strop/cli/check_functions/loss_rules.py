"""Rules that policy losses keep, one function each: what is wrong in a trial, in a sentence, or None."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.aggregation import batch_totals, token_weights
from strop.algorithms.names import AGGREGATION_MODES
from strop.cli.check_functions.loss_probe import (
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


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A batch on which a loss was tried, and what came of it."""

    loss: ProbedLoss
    example: LossBatch
    """The batch without the columns that the loss computes from all of it."""
    batch: LossBatch
    before: LossBatch
    """A copy of the batch from before the loss was called."""
    base: Seen
    """What the loss gave."""
    seed: int
    """Of further batches."""


Rule = Callable[[Trial], str | None]


def _detaches_statistics(trial: Trial) -> str | None:
    """Statistics are logged, so they must not hold the graph."""
    if trial.loss.declaration.is_user_convention:
        return None
    log_probs = trial.batch.columns["log_probs"].clone().requires_grad_()
    got = trial.loss.terms({**trial.batch.columns, "log_probs": log_probs}, trial.batch.mask)
    held = ", ".join(name for name, values in got.statistics.items() if values.requires_grad)
    return f"statistic {held} carries a gradient, which keeps the graph alive: detach it" if held else None


def _writes_into_nothing(trial: Trial) -> str | None:
    before = trial.before
    changed = [
        key for key, column in trial.batch.columns.items() if not torch.equal(column, before.columns[key])
    ]
    if not torch.equal(trial.batch.mask, before.mask):
        changed.append("response_mask")
    return f"it writes into the columns it is given: {', '.join(changed)} changed" if changed else None


def _repeats(trial: Trial) -> str | None:
    difference = gap_between(trial.base, trial.loss.whole(trial.batch))
    return difference and f"called twice on the same numbers, it differs: {difference}"


def _ignores_values_outside_the_mask(trial: Trial) -> str | None:
    batch = trial.batch
    outside = trial.base.gradient[~batch.mask].abs().max()
    if outside > ATOL:
        return f"tokens outside the mask have a gradient, of up to {float(outside):.3g}"
    filled = {
        key: torch.where(batch.mask, column, torch.full_like(column, GARBAGE))
        for key, column in batch.columns.items()
        if column.is_floating_point()
    }
    difference = gap_between(trial.base, trial.loss.seen(batch.replaced(**filled)))
    return difference and (
        f"depends on values outside the mask: with {GARBAGE} there in place of 0, {difference}"
    )


def _ignores_padding(trial: Trial) -> str | None:
    seen = trial.loss.seen(trial.batch.widened(3))
    width = trial.batch.mask.shape[1]
    difference = gap_between(trial.base, Seen(seen.loss, seen.gradient[:, :width]))
    return difference and f"changes with the padding: with 3 more positions of it, {difference}"


def _follows_the_order_of_rows(trial: Trial) -> str | None:
    order = torch.tensor([3, 0, 4, 2, 1])
    seen = trial.loss.whole(trial.example.rows(order))
    difference = gap_between(Seen(trial.base.loss, trial.base.gradient[order]), seen)
    return difference and f"changes with the order of the responses: {difference}"


def _is_the_sum_of_its_parts(trial: Trial) -> str | None:
    loss, batch = trial.loss, trial.batch
    totals = batch_totals(batch.mask)
    parts = [
        loss.seen(batch.rows(index), totals) for index in (torch.tensor([0, 1]), torch.tensor([2, 3, 4]))
    ]
    joined = Seen(sum(part.loss for part in parts), torch.cat([part.gradient for part in parts]))
    difference = gap_between(trial.base, joined)
    remedy = (
        "reduce it with agg_loss(..., **config.global_batch_info)"
        if loss.declaration.is_user_convention
        else "compute what concerns the whole batch in prepare"
    )
    return difference and (
        f"changes with how the batch is cut: for two and three responses in two calls, {difference}; {remedy}"
    )


def _ignores_an_empty_row(trial: Trial) -> str | None:
    def add(column: Tensor) -> Tensor:
        return torch.cat([column, torch.zeros_like(column[:1])])

    columns = {key: add(column) for key, column in trial.batch.columns.items()}
    seen = trial.loss.seen(LossBatch(columns, add(trial.batch.mask)))
    difference = gap_between(trial.base, Seen(seen.loss, seen.gradient[:-1]))
    return difference and f"changes with one more response without a token to train on: {difference}"


def _takes_both_layouts(trial: Trial) -> str | None:
    """Rows end to end must give the terms that padded rows give."""
    loss, batch = trial.loss, trial.batch
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
        return f"flat columns [N] do not give one term per token: {error}"
    padded = loss.terms(batch.columns, batch.mask).terms[present]
    gap = (flat - padded)[mask].abs().max()
    if gap <= ATOL + RTOL * padded[mask].abs().max():
        return None
    return f"flat columns [N] give other terms than padded ones [B, R], by up to {float(gap):.3g}"


def _moves_by_advantages_alone(trial: Trial) -> str | None:
    if trial.loss.declaration.moves_without_advantage:
        return None
    batch = example_batch(trial.seed + 1)
    zeros = batch.replaced(advantages=torch.zeros_like(batch.columns["advantages"]))
    largest = float(trial.loss.whole(zeros).gradient.abs().max())
    if largest <= ATOL:
        return None
    return (
        f"gradient not zero at zero advantage: up to {largest:.3g}. A loss with a penalty of its own declares "
        f"moves_without_advantage=True; otherwise samples that teach nothing move the policy"
    )


def _begins_as_reinforce(trial: Trial) -> str | None:
    """At log_probs == old_log_probs the gradient is that of REINFORCE, up to one constant, in some mode."""
    loss, batch = trial.loss, example_batch(trial.seed + 2, on_policy=True)
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
        return "no gradient where log_probs equal old_log_probs: nothing is ever learned"
    low, high = float(closest.min()) + 0.0, float(closest.max()) + 0.0  # a 0 has no sign
    meaning = (
        "a negative one pushes the policy away from rewarded answers"
        if low < 0
        else "one constant for all tokens is expected"
    )
    return (
        f"where log_probs equal old_log_probs, the gradient is {low:.4g} to {high:.4g} times that of REINFORCE "
        f"(-advantage * weight of the token): {meaning}"
    )


def _bears_extremes(trial: Trial) -> str | None:
    batch = example_batch(seed=0).to(torch.float32)
    mask = batch.mask
    for log_ratio in EXTREME_LOG_RATIOS:
        low, high = torch.full(mask.shape, -0.5 - abs(log_ratio)), torch.full(mask.shape, -0.5)
        new, old = (high, low) if log_ratio > 0 else (low, high)
        extreme = batch.replaced(
            log_probs=torch.where(mask, new, 0.0), old_log_probs=torch.where(mask, old, 0.0)
        )
        seen = trial.loss.whole(extreme)
        largest = float(seen.gradient.abs().max())
        if torch.isfinite(seen.gradient).all() and abs(seen.loss) < EXTREME_GRADIENT > largest:
            continue
        return (
            f"not finite, or out of hand, at log-ratio {log_ratio:g} in float32: the loss is {seen.loss:.3g} and its "
            f"largest gradient {largest:.3g}; clamp the log-ratio to +-20 before its exponential"
        )
    return None


def _uses_importance_weights(trial: Trial) -> str | None:
    """A loss of verl's convention multiplies its terms by the weights of the rollout correction itself."""
    loss, batch, base = trial.loss, trial.batch, trial.base
    if not loss.declaration.is_user_convention:
        return None
    if "rollout_is_weights" not in inspect.signature(loss.function).parameters:
        return None
    weights = torch.where(batch.mask, torch.full_like(batch.columns["advantages"], 0.5), 0.0)
    seen = loss.seen(batch.replaced(rollout_is_weights=weights))
    if gap_between(base, seen) is not None:
        return None
    return f"rollout_is_weights is a parameter, but weights of 0.5 change nothing: the loss stays {base.loss:.6g}"


RULES: Mapping[str, Rule] = {
    "statistics": _detaches_statistics,
    "inputs": _writes_into_nothing,
    "repeatable": _repeats,
    "outside the mask": _ignores_values_outside_the_mask,
    "padding width": _ignores_padding,
    "order of rows": _follows_the_order_of_rows,
    "cut of the batch": _is_the_sum_of_its_parts,
    "empty row": _ignores_an_empty_row,
    "layout": _takes_both_layouts,
    "zero advantage": _moves_by_advantages_alone,
    "on-policy": _begins_as_reinforce,
    "extreme log-ratio": _bears_extremes,
    "importance weights": _uses_importance_weights,
}
"""By the name that a finding carries."""
