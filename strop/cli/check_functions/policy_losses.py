"""`strop check loss`: a policy loss on a small float64 batch, and on variations of it.

These are the rules that catch most mistakes; the whole contract is in tests/algorithms/contract. Loss and gradient are
those of the whole batch, so a loss that returns terms and one that returns a number (verl's convention) are judged
alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals, batch_totals, token_weights, weighted_sum
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.losses import verl_convention
from strop.algorithms.losses.spec import shared_settings
from strop.algorithms.losses.terms import (
    POLICY_LOSS_REGISTRY,
    call_loss,
    call_prepare,
    get_policy_loss_fn,
)
from strop.algorithms.registry import Declaration, check_settings, with_own_settings
from strop.algorithms.specs import LOSS_SHARED_SETTINGS, policy_loss_declaration
from strop.cli.check_functions.findings import RuleBreach
from strop.utils.registry import required_parameters

RTOL, ATOL = 1e-8, 1e-11
"""Two float64 numbers are taken as equal within these."""
EXTREME_LOG_RATIOS = (50.0, -50.0, 200.0, -200.0)
"""Log-ratios far outside what training sees on purpose, and inside what one broken batch can show."""
EXTREME_GRADIENT = 1e12
"""Far above any gradient of a log-ratio clamped to +-20 on the check's batch (e^20 = 5e8)."""
GARBAGE = 7.25
"""Value outside the mask, where nothing may be read; finite, as a NaN would also show in harmless sums."""
COLUMNS = ("log_probs", "old_log_probs", "advantages", "ref_log_prob", "rollout_log_probs")
"""Columns of the batch; response_mask and row_ids come from its layout."""

Columns = dict[str, Tensor]
Seen = tuple[float, Tensor]
"""Loss of a batch, and its gradient by log_probs [B, R]."""


@dataclass(frozen=True, kw_only=True)
class ProbedLoss:
    """A loss under its settings and its aggregation mode."""

    name: str
    function: Callable[..., object]
    declaration: Declaration
    settings: Mapping[str, object]
    mode: str

    def whole(self, columns: Columns, mask: Tensor) -> Seen:
        """Loss and gradient of a whole batch, with its statistics."""
        return self.seen(self.prepared(columns, mask), mask, batch_totals(mask))

    def prepared(self, columns: Columns, mask: Tensor) -> Columns:
        """With the columns that the loss computes from the whole batch."""
        return columns | call_prepare(
            self.name, self.declaration, mask=mask, columns=columns, settings=self.settings
        )

    def seen(self, columns: Columns, mask: Tensor, totals: BatchTotals) -> Seen:
        """Loss and gradient of a batch, or of a part of one whose totals are given."""
        log_probs = columns["log_probs"].clone().requires_grad_()
        columns = {**columns, "log_probs": log_probs}
        if self.declaration.is_user_convention:
            config = verl_convention.loss_config(
                AlgorithmConfig(),
                name=self.name,
                totals=totals,
                loss_agg_mode=self.mode,
                settings=self.settings,
            )
            loss = verl_convention.call_loss_as_given(
                self.function, columns=columns, mask=mask, loss_agg_mode=self.mode, config=config
            ).loss
        else:
            terms = call_loss(
                self.name, self.function, self.declaration, mask=mask, columns=columns, settings=self.settings
            ).terms
            loss = weighted_sum(terms, self.weights(mask, totals, terms.dtype))
        gradient: Tensor | None = None
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, log_probs, allow_unused=True)
        return float(loss.detach()), torch.zeros_like(log_probs) if gradient is None else gradient

    def weights(self, mask: Tensor, totals: BatchTotals, dtype: torch.dtype) -> Tensor:
        """Weight of each token in the loss."""
        num_tokens, num_samples = max(totals.num_tokens, 1), max(totals.num_samples, 1)
        return token_weights(self.mode, mask, num_tokens=num_tokens, num_samples=num_samples, dtype=dtype)


def check_policy_loss(
    loss: str | Callable[..., object], *, settings: Mapping[str, object] | None = None
) -> list[RuleBreach]:
    """Rules that a policy loss breaks, each at most once; empty for a loss that keeps them all.

    Args:
        loss: a registered name, or a function: registered, of verl's convention, or one whose parameters are
            named like our columns (then those without a default are its columns).
        settings: those of the loss; clip ranges have the defaults of AlgorithmConfig.

    Raises:
        ValueError: unknown name or setting, or a column the check does not have. Other errors of the function
            itself go through.
    """
    probed = probed_loss(loss, settings or {})
    columns, mask = example_batch()
    try:
        loss_value, gradient = probed.whole(columns, mask)
    except ValueError as error:
        return [RuleBreach("form", str(error))]
    if not (torch.isfinite(torch.tensor(loss_value)) and torch.isfinite(gradient).all()):
        return [
            RuleBreach(
                "finite", f"on ordinary numbers the loss is {loss_value}, or its gradient is not finite"
            )
        ]
    return [RuleBreach(rule, sentence) for rule, sentence in _breaches(probed, columns, mask)]


def example_batch(*, on_policy: bool = False) -> tuple[Columns, Tensor]:
    """Five responses of up to six tokens, with gaps and an early end; 0 outside the mask."""
    mask = torch.tensor(
        [[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]],
        dtype=torch.bool,
    )
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    old = -0.2 - noise().abs()
    # Some ratios leave the usual clip ranges, most do not.
    log_probs = old.clone() if on_policy else (old + 0.15 * noise()).clamp(max=-0.01)
    per_row = torch.tensor([1.0, -0.75, 0.5, -1.5, 2.0], dtype=torch.float64)[:, None]
    advantages = per_row.expand(mask.shape) if on_policy else per_row + 0.2 * noise()
    reference, rollout = old + 0.1 * noise(), old + 0.01 * noise()
    columns = zip(COLUMNS, (log_probs, old, advantages, reference, rollout), strict=True)
    return {name: torch.where(mask, column, 0.0) for name, column in columns}, mask


def probed_loss(loss: str | Callable[..., object], settings: Mapping[str, object]) -> ProbedLoss:
    """A loss as it is called; arguments and errors are those of `check_policy_loss`."""
    function: Callable[..., object]
    if isinstance(loss, str):
        name, function, declaration = loss, get_policy_loss_fn(loss), policy_loss_declaration(loss)
    else:
        names = [key for key, registered in POLICY_LOSS_REGISTRY.items() if registered is loss]
        name = names[0] if names else getattr(loss, "__name__", repr(loss))
        function = loss
        declaration = policy_loss_declaration(name) if names else _inferred(loss)
    particular = {key: value for key, value in settings.items() if key not in LOSS_SHARED_SETTINGS}
    check_settings("policy loss", name, declaration, particular, elsewhere=LOSS_SHARED_SETTINGS)
    unknown = sorted(declaration.needs - {*COLUMNS, "response_mask", "row_ids", *declaration.prepared})
    if unknown:
        raise ValueError(
            f"policy loss {name!r} needs {', '.join(unknown)}, which the check's batch does not have; it has "
            f"{', '.join(COLUMNS)}, response_mask and row_ids"
        )
    shared = shared_settings(AlgorithmConfig())
    return ProbedLoss(
        name=name,
        function=function,
        declaration=declaration,
        settings=dict(settings) if declaration.is_user_convention else {**shared, **settings},
        mode=declaration.aggregation_mode(None),
    )


def _inferred(function: Callable[..., object]) -> Declaration:
    """A function with a parameter log_probs takes our columns; any other follows verl's convention."""
    parameters = inspect.signature(function).parameters
    if "log_probs" not in parameters:
        return Declaration()
    inferred = Declaration(
        needs=frozenset(required_parameters(function)) - LOSS_SHARED_SETTINGS.keys(),
        settings=frozenset(parameters.keys() & LOSS_SHARED_SETTINGS.keys()),
    )
    return with_own_settings(function, inferred)


def _breaches(loss: ProbedLoss, example: Columns, mask: Tensor) -> Iterator[tuple[str, str]]:
    """Broken rules, each with a sentence."""
    columns, totals = loss.prepared(example, mask), batch_totals(mask)
    copies = {name: column.clone() for name, column in columns.items()}
    base = loss.seen(copies, mask, totals)
    changed = [name for name, column in columns.items() if not torch.equal(copies[name], column)]
    if changed:
        yield "inputs", f"it writes into the columns it is given: {', '.join(changed)} changed"
    outside = float(base[1][~mask].abs().max())
    if outside > ATOL:
        yield "outside the mask", f"tokens outside the mask have a gradient, of up to {outside:.3g}"
    else:
        filled = {
            name: torch.where(mask, column, GARBAGE) if column.is_floating_point() else column
            for name, column in columns.items()
        }
        if gap := _gap(base, loss.seen(filled, mask, totals)):
            yield (
                "outside the mask",
                f"depends on values outside the mask: with {GARBAGE} there in place of 0, {gap}",
            )
    wide = {name: torch.nn.functional.pad(column, (0, 3)) for name, column in columns.items()}
    value, gradient = loss.seen(wide, torch.nn.functional.pad(mask, (0, 3)), totals)
    if gap := _gap(base, (value, gradient[:, : mask.shape[1]])):
        yield "padding width", f"changes with the padding: with 3 more positions of it, {gap}"
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled = {name: column[order] for name, column in example.items()}
    if gap := _gap((base[0], base[1][order]), loss.whole(shuffled, mask[order])):
        yield "order of rows", f"changes with the order of the responses: {gap}"
    parts = [
        loss.seen({name: column[rows] for name, column in columns.items()}, mask[rows], totals)
        for rows in (slice(0, 2), slice(2, 5))
    ]
    if gap := _gap(base, (sum(part[0] for part in parts), torch.cat([part[1] for part in parts]))):
        remedy = (
            "reduce it with agg_loss(..., **config.global_batch_info)"
            if loss.declaration.is_user_convention
            else "compute what concerns the whole batch in prepare"
        )
        yield (
            "cut of the batch",
            f"changes with how the batch is cut: for two and three responses in two calls, {gap}; {remedy}",
        )
    yield from _on_policy(loss, totals)
    yield from _extremes(loss)


def _on_policy(loss: ProbedLoss, totals: BatchTotals) -> Iterator[tuple[str, str]]:
    """At log_probs == old_log_probs the gradient has the sign of REINFORCE."""
    columns, mask = example_batch(on_policy=True)
    gradient = loss.whole(columns, mask)[1]
    weights = loss.weights(mask, totals, torch.float64)
    factors = (gradient / (-columns["advantages"] * weights))[mask]
    if not factors.any():
        yield "on-policy", "no gradient where log_probs equal old_log_probs: nothing is ever learned"
    elif factors.min() < 0:
        low, high = float(factors.min()), float(factors.max()) + 0.0  # a 0 has no sign
        sentence = (
            f"where log_probs equal old_log_probs, the gradient is {low:.4g} to {high:.4g} times that of REINFORCE "
            f"(-advantage * weight of the token): a negative one pushes the policy away from rewarded answers"
        )
        yield "on-policy", sentence


def _extremes(loss: ProbedLoss) -> Iterator[tuple[str, str]]:
    """Loss and gradient in float32 where one broken batch has log-ratios far out."""
    columns, mask = example_batch()
    columns = {name: column.float() for name, column in columns.items()}
    for log_ratio in EXTREME_LOG_RATIOS:
        low, high = torch.full(mask.shape, -0.5 - abs(log_ratio)), torch.full(mask.shape, -0.5)
        new, old = (high, low) if log_ratio > 0 else (low, high)
        extreme = {"log_probs": torch.where(mask, new, 0.0), "old_log_probs": torch.where(mask, old, 0.0)}
        value, gradient = loss.whole(columns | extreme, mask)
        largest = float(gradient.abs().max())
        if not torch.isfinite(gradient).all() or not abs(value) < EXTREME_GRADIENT > largest:
            sentence = (
                f"not finite, or out of hand, at log-ratio {log_ratio:g} in float32: the loss is {value:.3g} and its "
                f"largest gradient {largest:.3g}; clamp the log-ratio to +-20 before its exponential"
            )
            yield "extreme log-ratio", sentence
            return


def _gap(expected: Seen, seen: Seen) -> str:
    """Difference of two results in words; "" if they are equal."""
    if not abs(seen[0] - expected[0]) <= ATOL + RTOL * max(abs(expected[0]), 1.0):
        return f"the loss is {seen[0]:.6g} and not {expected[0]:.6g}"
    gap, largest = (seen[1] - expected[1]).abs(), expected[1].abs().max()
    if not bool((gap <= ATOL + RTOL * largest).all()):
        return (
            f"the loss stays {expected[0]:.6g}, but its gradient changes by up to {float(gap.max()):.3g} (its largest "
            f"entry is {float(largest):.3g})"
        )
    return ""
