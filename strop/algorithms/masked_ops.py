"""Sums, means and whitening over the valid positions of a tensor.

Values outside the mask never matter, also where they are NaN or infinite. Means divide by the exact
count; the 1e-8 that verl adds to it would bias every short row.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPS = 1e-8
"""Added to the variance before its root, so that equal values whiten to 0 and not to NaN."""


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is true, over all positions or along one axis; same shape for both."""
    masked = torch.where(mask.bool(), values, torch.zeros_like(values))
    return masked.sum() if axis is None else masked.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is true; 0 where nothing is valid (a row without tokens)."""
    valid = mask.bool()
    count = valid.sum() if axis is None else valid.sum(dim=axis)
    return masked_sum(values, valid, axis) / count.clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(v - mean) / sqrt(var + 1e-8) over the valid values, exactly 0 outside the mask, and for a single valid value,
    which has nothing to be compared with."""
    valid = mask.bool()
    count = int(valid.sum())
    if count < 2:
        return torch.zeros_like(values)
    # Without the smallest value, equal values give exactly 0 whatever their rounding.
    shifted = values - values[valid].min()
    centered = torch.where(valid, shifted - masked_mean(shifted, valid), torch.zeros_like(shifted))
    whitened = centered * torch.rsqrt(centered.square().sum() / (count - 1) + WHITEN_EPS)
    return torch.where(valid, whitened, torch.zeros_like(whitened))
