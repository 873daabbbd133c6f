"""Triton kernels of a decode step between its products: what a layer does there in four launches, beside attention.

A step of a few sequences is many short kernels, of which a card starts one every two or three microseconds, whatever
they compute. One of these adds to the residual stream and norms the sum, two kernels of the model's own pass; one norms
and turns queries and keys that come from one product, four of its kernels; one gates the halves of another product. Not
measured on a card yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.utils.triton import jit, tl, triton

MAX_DIM = 8192
"""Longest row that a program holds."""
_HEADS = 8
"""Heads that a program turns."""
_NUMBERS = 1024
"""Numbers of a gated row that a program computes."""


def add_and_norm(
    stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Norm [B, D] of a stream [B, D], computed in float32, in this precision; delta is added to the stream before, in
    place.

    Args:
        stream: contiguous; changed where there is a delta.
        delta: [B, D], contiguous; None: nothing.
        weight: [D] of the norm.
        eps: is added to the mean of squares.
        dtype: of the result.
    """
    count, dim = stream.shape
    out = torch.empty_like(stream, dtype=dtype)
    _add_and_norm[(count,)](
        stream, stream if delta is None else delta, weight, out, dim, eps,
        HAS_DELTA=delta is not None, DIM=triton.next_power_of_2(dim), num_warps=4 if dim <= 2048 else 8,
    )  # fmt: skip
    return out


def turn_heads(
    states: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    num_heads: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, D], keys and values [B, Hkv, D] from states [B, (H + 2 Hkv) D] of one product: queries and keys
    normed, where they are, and turned.

    Args:
        states: contiguous; the results have their precision.
        norms: weights [D] of queries and keys; None: no norms.
        eps: of the norms.
        cosines, sines: [B, D] of the tokens' positions, contiguous.
        num_heads: H and Hkv.
    """
    (heads, kv_heads), (count, dim) = num_heads, cosines.shape
    query = states.new_empty(count, heads, dim)
    key, value = (states.new_empty(count, kv_heads, dim) for _ in range(2))
    all_heads = heads + 2 * kv_heads
    query_norm, key_norm = norms or (cosines, cosines)
    _turn_heads[(count, triton.cdiv(all_heads, _HEADS))](
        states, query_norm, key_norm, cosines, sines, query, key, value, eps, heads, kv_heads,
        HAS_NORMS=norms is not None, HEADS=_HEADS, HALF=dim // 2, num_warps=4,
    )  # fmt: skip
    return query, key, value


def gate_halves(states: Tensor) -> Tensor:
    """silu(gates) times ups [B, F] of states [B, 2 F] of one product, which has the gates first; contiguous."""
    count, width = len(states), states.shape[1] // 2
    out = states.new_empty(count, width)
    _gate_halves[(triton.cdiv(width, _NUMBERS), count)](states, out, width, NUMBERS=_NUMBERS, num_warps=4)
    return out


@jit
def _add_and_norm(stream, delta, weight, out, dim, eps, HAS_DELTA: tl.constexpr, DIM: tl.constexpr):
    columns = tl.arange(0, DIM)
    inside = columns < dim
    at = tl.program_id(0).to(tl.int64) * dim + columns
    x = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(stream.dtype.element_ty)
        tl.store(stream + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)
    tl.store(out + at, (x * scale * w).to(out.dtype.element_ty), mask=inside)


@jit
def _turn_heads(
    states, query_norm, key_norm, cosines, sines, query, key, value, eps, heads, kv_heads,
    HAS_NORMS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    rows, places = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    is_query = rows < heads
    is_key = (rows >= heads) & (rows < heads + kv_heads)
    is_value = (rows >= heads + kv_heads) & (rows < heads + 2 * kv_heads)
    inside = (rows < heads + 2 * kv_heads)[:, None] & (places >= 0)[None, :]
    at = (token * (heads + 2 * kv_heads) + rows[:, None]) * 2 * HALF + places[None, :]
    left = tl.load(states + at, mask=inside, other=0.0)
    right = tl.load(states + at + HALF, mask=inside, other=0.0)
    x, y = left.to(tl.float32), right.to(tl.float32)
    if HAS_NORMS:
        scale = 1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)
        q_left, q_right = tl.load(query_norm + places), tl.load(query_norm + HALF + places)
        k_left, k_right = tl.load(key_norm + places), tl.load(key_norm + HALF + places)
        w_left = tl.where(is_query[:, None], q_left.to(tl.float32)[None, :], k_left.to(tl.float32)[None, :])
        w_right = tl.where(
            is_query[:, None], q_right.to(tl.float32)[None, :], k_right.to(tl.float32)[None, :]
        )
        x, y = x * scale[:, None] * w_left, y * scale[:, None] * w_right
    at_angle = token * 2 * HALF + places
    cos_left = tl.load(cosines + at_angle).to(tl.float32)[None, :]
    cos_right = tl.load(cosines + at_angle + HALF).to(tl.float32)[None, :]
    sin_left = tl.load(sines + at_angle).to(tl.float32)[None, :]
    sin_right = tl.load(sines + at_angle + HALF).to(tl.float32)[None, :]
    new_left = (x * cos_left - y * sin_left).to(query.dtype.element_ty)
    new_right = (y * cos_right + x * sin_right).to(query.dtype.element_ty)
    at_query = query + (token * heads + rows[:, None]) * 2 * HALF + places[None, :]
    tl.store(at_query, new_left, mask=inside & is_query[:, None])
    tl.store(at_query + HALF, new_right, mask=inside & is_query[:, None])
    at_key = (token * kv_heads + rows[:, None] - heads) * 2 * HALF + places[None, :]
    tl.store(key + at_key, new_left, mask=inside & is_key[:, None])
    tl.store(key + at_key + HALF, new_right, mask=inside & is_key[:, None])
    at_value = (token * kv_heads + rows[:, None] - heads - kv_heads) * 2 * HALF + places[None, :]
    tl.store(value + at_value, left, mask=inside & is_value[:, None])
    tl.store(value + at_value + HALF, right, mask=inside & is_value[:, None])


@jit
def _gate_halves(states, out, width, NUMBERS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    inside = columns < width
    gates = tl.load(states + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(states + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * width + columns, (gates * tl.sigmoid(gates) * ups).to(out.dtype.element_ty), mask=inside
    )
