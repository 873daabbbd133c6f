"""Reduction for losses that reduce by themselves, as in verl."""

from __future__ import annotations

from torch import Tensor

from strop.algorithms.aggregation import batch_totals, token_weights, weighted_sum


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """One number from per-token losses [B, R], in verl's calling convention.

    For loss functions that reduce by themselves: summed over micro-batches and averaged over `dp_size`
    ranks, it equals the loss of the whole batch, given that batch's totals. Without totals it reduces the
    given rows as if they were the whole batch (then it does depend on the cut).

    seq-mean-token-sum-norm requires `loss_scale_factor`: the padded width, a default elsewhere, changes with
    the longest row of a micro-batch.

    Raises:
        ValueError: unknown mode, a missing scale, or `dp_size` > 1 without the total the mode divides by.
    """
    if dp_size > 1:
        needed = {"token-mean": batch_num_tokens, "token-sum": 0}.get(loss_agg_mode, global_batch_size)
        if needed is None:
            name = "batch_num_tokens" if loss_agg_mode == "token-mean" else "global_batch_size"
            raise ValueError(
                f"{loss_agg_mode} over {dp_size} ranks needs {name}, the count over all ranks: pass it"
            )
    if batch_num_tokens is None or global_batch_size is None:  # waits for the device
        local = batch_totals(loss_mask)
        # A micro-batch without valid tokens adds 0, so the count it divides by does not matter.
        batch_num_tokens = max(local.num_tokens, 1) if batch_num_tokens is None else batch_num_tokens
        global_batch_size = max(local.num_samples, 1) if global_batch_size is None else global_batch_size
    weights = token_weights(
        loss_agg_mode,
        loss_mask,
        num_tokens=batch_num_tokens,
        num_samples=global_batch_size,
        scale=loss_scale_factor if loss_agg_mode == "seq-mean-token-sum-norm" else None,
        dtype=loss_mat.dtype,
    )
    return weighted_sum(loss_mat, weights) * dp_size
