"""The critic's loss as per-token terms, and how well values explain returns.

As with policy losses (strop.algorithms.losses), terms are not reduced: `weighted_sum(terms, token_weights(...))` of the
optimizer batch is the loss, for any cut into micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.utils.metrics import Metric

VALUE_STATISTIC = Metric(
    "critic/{vf_clipfrac,vpred_mean}",
    "share; reward",
    "values held by the clipping; value; mean over trained tokens",
)


@dataclass(frozen=True, kw_only=True)
class ValueLossTerms:
    """One number per token, in the shape of the inputs."""

    terms: Tensor
    """Loss of each token, not reduced; carries the gradient."""
    statistics: Mapping[str, Tensor]
    """Detached per-token numbers by metric name."""


def value_loss_terms(
    values: Tensor, old_values: Tensor, returns: Tensor, *, mask: Tensor, clip_range: float
) -> ValueLossTerms:
    """Half the squared error, or that of the value clipped around the old one, whichever is larger.

        term = max((v - G)^2, (clamp(v, v_old - c, v_old + c) - G)^2) / 2

    Args:
        values: current values, with gradient; any shape.
        old_values: values at the start of the step; same shape, as are the returns.
        returns: what the values should have been.
        mask: same shape, true on tokens that are trained on; any number elsewhere, NaN included, does no harm.
        clip_range: c, in reward units.

    Returns:
        Terms, and the statistics vf_clipfrac (1 where the clipped error is the larger one, so that the token
        gives no gradient) and vpred_mean (the current value).

    Source: the value clipping that came with the implementations of Schulman et al. 2017, arXiv:1707.06347.
    """
    valid = mask.bool()
    values, old_values, returns = (
        torch.where(valid, part, torch.zeros_like(part)) for part in (values, old_values, returns)
    )
    bounded = values.clamp(old_values - clip_range, old_values + clip_range)
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    with torch.no_grad():
        statistics = {
            "vf_clipfrac": (clipped > plain).to(values.dtype),
            "vpred_mean": values.detach(),
        }
    return ValueLossTerms(terms=torch.maximum(plain, clipped) / 2, statistics=statistics)


@dataclass(frozen=True, kw_only=True)
class ExplainedVariance:
    """Share of the variance of returns that the values explain: 1 - var(errors) / var(returns).

    Parts merge exactly: a part carries its count, its means and its sums of squares around them.
    """

    count: int = 0
    """Tokens."""
    return_mean: float = 0.0
    return_squares: float = 0.0
    """Sum of squared distances of the returns from their mean."""
    error_mean: float = 0.0
    """Mean of return minus value."""
    error_squares: float = 0.0
    """Sum of squared distances of the errors from their mean."""

    def merge(self, other: ExplainedVariance) -> ExplainedVariance:
        """Merge with the sums over other tokens.

        Source: Chan, Golub and LeVeque 1979, updating formulae for sample variances.
        """
        count = self.count + other.count
        if not count:
            return self
        share = other.count / count
        return_gap, error_gap = other.return_mean - self.return_mean, other.error_mean - self.error_mean
        return ExplainedVariance(
            count=count,
            return_mean=self.return_mean + return_gap * share,
            return_squares=self.return_squares + other.return_squares + return_gap**2 * self.count * share,
            error_mean=self.error_mean + error_gap * share,
            error_squares=self.error_squares + other.error_squares + error_gap**2 * self.count * share,
        )

    @property
    def is_over_nothing(self) -> bool:
        """The returns do not vary."""
        return self.return_squares == 0

    @property
    def value(self) -> float:
        """1 - var(errors) / var(returns), or NaN where the returns do not vary."""
        return 1 - self.error_squares / self.return_squares if self.return_squares > 0 else math.nan


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> ExplainedVariance:
    """1 - var(returns - values) / var(returns) over the valid tokens of a part, as it merges over parts.

    Source: the usual diagnostic of a critic: 1 is a perfect one, 0 no better than a constant, and below 0 is
        worse than that.
    """
    valid = mask.bool()
    targets = returns.detach()[valid].double()
    errors = targets - values.detach()[valid].double()
    count = targets.numel()
    if not count:
        return ExplainedVariance()
    return ExplainedVariance(
        count=count,
        return_mean=float(targets.mean()),
        return_squares=float((targets - targets.mean()).square().sum()),
        error_mean=float(errors.mean()),
        error_squares=float((errors - errors.mean()).square().sum()),
    )
