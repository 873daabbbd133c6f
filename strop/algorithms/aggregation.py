"""Aggregation of per-token terms into one loss: weights per token, fixed once for a whole optimizer batch.

    loss = sum over all micro-batches and ranks of sum(weights * terms)

The weights divide by counts of the optimizer batch over all ranks, never of a micro-batch, so the sum does
not depend on how the batch was cut. Gradients are summed, not averaged, over micro-batches and ranks. One
mask gives both the numerator and the counts: a token that is rejected leaves both.

Two layouts: padded, with a mask [B, R]; and flat, with a mask [N] over the rows' tokens end to end and
`row_lengths` [B], whose sum is N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.names import AGGREGATION_MODES


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Denominators of one optimizer batch."""

    num_tokens: int
    """Tokens trained on."""
    num_samples: int
    """Samples with at least one such token."""


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """Reduction of the per-token terms of an optimizer batch to one loss."""

    mode: str
    """One of AGGREGATION_MODES; see `token_weights`."""
    scale: float | None = None
    """The constant of seq-mean-token-sum-norm, in tokens."""

    def weights(
        self, mask: Tensor, totals: BatchTotals, row_lengths: Tensor, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Weight [N] of each token of whole rows in the loss of the optimizer batch; 0 outside the mask.

        Args:
            mask: [N], true on tokens that are trained on; of any rows of the batch.
            totals: counts of the whole optimizer batch, over all ranks.
            row_lengths: [B] int64, tokens of each row.
            dtype: of the weights.

        Raises:
            ValueError: as `token_weights`.
        """
        return token_weights(
            self.mode,
            mask.bool(),
            num_tokens=totals.num_tokens,
            num_samples=totals.num_samples,
            scale=self.scale,
            row_lengths=row_lengths,
            dtype=dtype,
        )


def batch_totals(mask: Tensor, row_lengths: Tensor | None = None) -> BatchTotals:
    """Counts under a mask, in either layout (see the module's text)."""
    per_row = valid_tokens_per_row(mask, row_lengths)
    return BatchTotals(num_tokens=int(per_row.sum()), num_samples=int((per_row > 0).sum()))


def token_weights(
    mode: str,
    mask: Tensor,
    *,
    num_tokens: int,
    num_samples: int,
    scale: float | None = None,
    row_lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of each token, in the shape of `mask`, 0 where it is false; one number per sample i in every mode.

        token-mean                1 / num_tokens
        token-sum                 1
        seq-mean-token-sum        1 / num_samples
        seq-mean-token-sum-norm   1 / (num_samples * scale)
        seq-mean-token-mean       1 / (num_samples * num_valid_i)

    Args:
        mask: true on tokens that are trained on, in either layout; the optimizer batch, or any of its parts that
            consist of whole rows. The counts are those of the optimizer batch in every case.
        num_tokens: such tokens in the whole optimizer batch, over all ranks.
        num_samples: samples in the whole optimizer batch, over all ranks.
        scale: the constant of seq-mean-token-sum-norm, in tokens; no other mode takes it. There is no
            default: the width of a padded batch would make the loss depend on its longest row.
        row_lengths: [B] int64, for the flat layout.
        dtype: of the result.

    Raises:
        ValueError: unknown mode, a scale missing or out of place, or a batch without tokens.

    Source: token-mean: Yu et al. 2025, arXiv:2503.14476; the constant divisor: Liu et al. 2025,
        arXiv:2503.20783; seq-mean-token-mean: Shao et al. 2024, arXiv:2402.03300.
    """
    _check(mode, num_tokens=num_tokens, num_samples=num_samples, scale=scale)
    num_valid = valid_tokens_per_row(mask, row_lengths)
    per_sample = torch.ones(num_valid.shape, dtype=dtype, device=mask.device)  # [B]
    if mode == "token-mean":
        per_sample = per_sample / num_tokens
    elif mode == "seq-mean-token-sum":
        per_sample = per_sample / num_samples
    elif mode == "seq-mean-token-mean":
        per_sample = per_sample / (num_valid.clamp(min=1).to(dtype) * num_samples)
    elif scale is not None:
        per_sample = per_sample / (num_samples * scale)
    if row_lengths is None:
        per_token = per_sample[:, None].expand(mask.shape)
    else:
        per_token = per_sample.repeat_interleave(row_lengths)
    return torch.where(mask.bool(), per_token, torch.zeros((), dtype=dtype, device=mask.device))


def weighted_sum(terms: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights * terms; terms of weight 0 do not matter, also where they are NaN."""
    return (torch.where(weights != 0, terms, torch.zeros_like(terms)) * weights).sum()


def valid_tokens_per_row(mask: Tensor, row_lengths: Tensor | None = None) -> Tensor:
    """[B] int64: true positions of each row, in either layout.

    Raises:
        ValueError: a flat mask without row_lengths, or lengths that do not add up to the mask's size.
    """
    if row_lengths is None:
        if mask.dim() != 2:
            raise ValueError(
                f"a mask of shape {tuple(mask.shape)} is flat: pass row_lengths, the tokens of each row"
            )
        return mask.bool().sum(dim=1)
    rows = row_numbers(row_lengths)
    if mask.shape != rows.shape:
        raise ValueError(
            f"row_lengths add up to {rows.numel()} tokens, but the flat mask has shape {tuple(mask.shape)}"
        )
    zeros = torch.zeros(row_lengths.shape, dtype=torch.int64, device=mask.device)
    return zeros.index_add(0, rows, mask.bool().to(torch.int64))


def row_numbers(row_lengths: Tensor) -> Tensor:
    """[N] int64: the row of each token of a flat layout."""
    return torch.arange(row_lengths.numel(), device=row_lengths.device).repeat_interleave(row_lengths)


def _check(mode: str, *, num_tokens: int, num_samples: int, scale: float | None) -> None:
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"unknown loss aggregation mode {mode!r}; known: {', '.join(AGGREGATION_MODES)}")
    if num_tokens < 1 or num_samples < 1:
        raise ValueError(
            f"an optimizer batch of {num_samples} samples and {num_tokens} tokens has nothing to train on: "
            f"skip the step, or look for why every token was masked or rejected"
        )
    if mode != "seq-mean-token-sum-norm":
        if scale is not None:
            raise ValueError(f"a scale of {scale} was given, but {mode} does not divide by one: leave it out")
    elif scale is None:
        raise ValueError(
            "seq-mean-token-sum-norm divides by a constant: set algorithm.loss_scale_factor, usually to "
            "data.max_response_tokens"
        )
    elif not scale > 0:
        raise ValueError(f"seq-mean-token-sum-norm divides by its scale, which is {scale}: use one above 0")
