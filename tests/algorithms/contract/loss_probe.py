"""A policy loss on a small batch of known numbers: what `policy_losses` asks its questions with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals, batch_totals, token_weights, weighted_sum
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.losses import verl_convention
from strop.algorithms.losses.terms import PolicyLossTerms, call_loss, call_prepare
from strop.algorithms.registry import Declaration

RTOL, ATOL = 1e-8, 1e-11
"""Two float64 numbers are taken as equal within these."""


@dataclass(frozen=True)
class LossBatch:
    """Padded columns [B, R] by name, and the mask [B, R]."""

    columns: Mapping[str, Tensor]
    mask: Tensor

    def replaced(self, **columns: Tensor) -> LossBatch:
        return LossBatch({**self.columns, **columns}, self.mask)

    def rows(self, index: Tensor) -> LossBatch:
        return LossBatch({key: column[index] for key, column in self.columns.items()}, self.mask[index])

    def widened(self, by: int) -> LossBatch:
        """With `by` more positions at the right, outside the mask."""

        def pad(column: Tensor) -> Tensor:
            return torch.nn.functional.pad(column, (0, by))

        return LossBatch({key: pad(column) for key, column in self.columns.items()}, pad(self.mask))

    def to(self, dtype: torch.dtype) -> LossBatch:
        return LossBatch(
            {key: c.to(dtype) if c.is_floating_point() else c for key, c in self.columns.items()}, self.mask
        )


@dataclass(frozen=True)
class Seen:
    """Loss of a batch, and its gradient by log_probs [B, R]."""

    loss: float
    gradient: Tensor


@dataclass(frozen=True, kw_only=True)
class ProbedLoss:
    """A loss under its settings and its aggregation mode."""

    name: str
    function: Callable[..., object]
    declaration: Declaration
    settings: Mapping[str, object]
    mode: str

    def seen(self, batch: LossBatch, totals: BatchTotals | None = None) -> Seen:
        """Loss and gradient of a batch, or of a part of one whose totals are given."""
        totals = totals or batch_totals(batch.mask)
        log_probs = batch.columns["log_probs"].clone().requires_grad_()
        columns = {**batch.columns, "log_probs": log_probs}
        if self.declaration.is_user_convention:
            config = verl_convention.loss_config(
                AlgorithmConfig(),
                name=self.name,
                totals=totals,
                loss_agg_mode=self.mode,
                settings=self.settings,
            )
            loss = verl_convention.call_loss_as_given(
                self.function, columns=columns, mask=batch.mask, loss_agg_mode=self.mode, config=config
            ).loss
        else:
            terms = self.terms(columns, batch.mask).terms
            weights = token_weights(
                self.mode,
                batch.mask,
                num_tokens=max(totals.num_tokens, 1),
                num_samples=max(totals.num_samples, 1),
                dtype=terms.dtype,
            )
            loss = weighted_sum(terms, weights)
        gradient: Tensor | None = None
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, log_probs, allow_unused=True)
        return Seen(float(loss.detach()), torch.zeros_like(log_probs) if gradient is None else gradient)

    def terms(self, columns: Mapping[str, Tensor], mask: Tensor) -> PolicyLossTerms:
        return call_loss(
            self.name,
            self.function,
            self.declaration,
            mask=mask,
            columns=columns,
            settings=self.settings,
        )

    def prepared(self, batch: LossBatch) -> LossBatch:
        """With the columns that the loss computes from the whole batch."""
        made = call_prepare(
            self.name, self.declaration, mask=batch.mask, columns=batch.columns, settings=self.settings
        )
        return batch.replaced(**made)

    def whole(self, batch: LossBatch) -> Seen:
        """Loss and gradient of a whole batch, with its statistics."""
        return self.seen(self.prepared(batch))


def example_batch(seed: int, *, on_policy: bool = False) -> LossBatch:
    """Five responses of up to six tokens, with gaps and an early end; 0 outside the mask."""
    mask = torch.tensor(
        [[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]],
        dtype=torch.bool,
    )
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    old = -0.2 - noise().abs()
    # Some ratios leave the usual clip ranges, most do not.
    log_probs = old.clone() if on_policy else (old + 0.15 * noise()).clamp(max=-0.01)
    per_row = torch.tensor([1.0, -0.75, 0.5, -1.5, 2.0], dtype=torch.float64)
    advantages = per_row[:, None].expand(mask.shape)
    if not on_policy:
        advantages = advantages + 0.2 * noise()
    columns = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "advantages": advantages,
        "ref_log_prob": old + 0.1 * noise(),
        "rollout_log_probs": old + 0.01 * noise(),
    }
    return LossBatch({key: torch.where(mask, column, 0.0) for key, column in columns.items()}, mask)


def gap_between(expected: Seen, seen: Seen) -> str | None:
    """How two results differ, in words; None if they are equal."""
    scale = ATOL + RTOL * max(abs(expected.loss), 1.0)
    if not abs(seen.loss - expected.loss) <= scale:
        return f"the loss is {seen.loss:.6g} and not {expected.loss:.6g}"
    gap = (seen.gradient - expected.gradient).abs()
    if not bool((gap <= ATOL + RTOL * expected.gradient.abs().max()).all()):
        largest = float(gap.max())
        return (
            f"the loss stays {expected.loss:.6g}, but its gradient changes by up to {largest:.3g} (its largest "
            f"entry is {float(expected.gradient.abs().max()):.3g})"
        )
    return None
