"""Reward shaping: what happens to scores before they become advantages."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def overlong_penalty(
    response_lengths: Tensor,
    *,
    max_tokens: int,
    buffer_tokens: int,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """DAPO's soft penalty on long responses [B], to be added to the reward: between -factor and 0.

        0                                                    up to max_tokens - buffer_tokens
        factor * (max_tokens - buffer_tokens - len) / buffer_tokens    from there to max_tokens
        -factor                                              above max_tokens

    Args:
        response_lengths: [B] integers, tokens of each response.
        max_tokens: the length at which the penalty is full.
        buffer_tokens: how far below it the penalty starts.
        factor: the full penalty, in reward units, at least 0.
        dtype: of the result.

    Raises:
        ValueError: the buffer is not between 1 and max_tokens, or the factor is negative or not finite.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13; the factor is 1 there.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"the over-long buffer is {buffer_tokens} tokens and the maximum length {max_tokens}: the buffer lies "
            f"below the maximum, so use a number between 1 and {max_tokens}"
        )
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(
            f"the over-long penalty factor is {factor}: use a finite number of at least 0, such as 1.0"
        )
    free = max_tokens - buffer_tokens
    share = (response_lengths.to(torch.float64) - free) / buffer_tokens
    # Subtracting from 0 keeps a response without a penalty at 0, not at -0.
    return (0.0 - factor * share.clamp(0.0, 1.0)).to(dtype)
