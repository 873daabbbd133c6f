"""Attention of a decode step on a CUDA device: a Triton kernel that writes the new keys and values and reads what each
sequence has, no more, from the pages that its row of a table names.

Lengths and table are read on the device, so a captured step serves sequences of any length in any pages, and a batch of
unequal ones reads its own keys instead of the longest one's. Where Triton or the device is missing, cache.py computes
the same by torch.
Last measured: benchmarks/RESULTS.md.

Source: Dao et al. 2023, Flash-Decoding: keys are divided among programs, whose sums are joined at the end.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from strop.engines.attention_form import AttentionForm
from strop.utils.triton import has_kernels, jit_of_any, tl

KEYS = 64
"""Keys that a program reads at one time ..."""
KEY_BYTES = 32 << 10
"""... or fewer where they have more bytes: it holds them in shared memory, of which smaller cards have 99 KiB ..."""
TURING_KEY_BYTES = 16 << 10
"""... and those of compute capability 7.5 have 64 KiB."""
PROGRAMS = 528
"""Programs that keep a device busy: four for each multiprocessor of an H100."""
MAX_SPLITS = 16
"""Parts into which one sequence's keys are divided at most."""
_MIN_ROWS = 16
"""Rows of the smallest product of matrices; query heads that share a key head are padded to so many."""


def reads(keys: Tensor, query: Tensor, form: AttentionForm, *, value_dim: int) -> bool:
    """True if the kernel computes such a layer, for query [B, H, D] and keys [pages, Hkv, P, D]."""
    dim = query.shape[2]
    has_form = form.is_fused and form.chunk is None
    has_shape = keys.shape[3] == dim == value_dim and dim in (16, 32, 64, 128, 256)
    return has_form and has_shape and has_kernels(keys.device) and keys.dtype != torch.float64


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    form: AttentionForm,
) -> Tensor:
    """Attention output [B, H, D] for query [B, H, D]; key and value [B, Hkv, D] enter the cache behind the others.

    Args:
        query, key, value: of one new token per sequence.
        keys, values: [pages, Hkv, P, D], alike in memory.
        table: [slots, n] int32, pages of each sequence in order; of the first B slots.
        lengths: [B] int64, tokens already there; there is a page for one more.
        form: of the layer, without chunks, sinks and caps.
    """
    b, heads, dim = query.shape
    kv_heads = keys.shape[1]
    splits = num_splits(b * kv_heads)
    query, key, value = (part.to(keys.dtype).contiguous() for part in (query, key, value))
    out = torch.empty_like(query)
    # [S, B, H, D] and, for each, the largest score and the sum of weights; one part is the output.
    parts = sums = out
    if splits > 1:
        parts = torch.empty(splits, b, heads, dim, dtype=torch.float32, device=query.device)
        sums = torch.empty(splits, b, heads, 2, dtype=torch.float32, device=query.device)
    group = heads // kv_heads
    rows = max(_MIN_ROWS, 1 << (group - 1).bit_length())
    at_once = min(KEYS, _key_bytes(keys.device) // (dim * keys.element_size()))
    _attend[(b, kv_heads, splits)](
        query, key, value, keys, values, table, lengths, parts, sums, form.scaling, form.window or 0,
        *keys.stride()[:3], table.stride(0), splits,
        GROUP=group, ROWS=rows, DIM=dim, KEYS=at_once, PAGE=keys.shape[2], IS_WHOLE=splits == 1, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _join[(b, heads)](parts, sums, out, splits, DIM=dim, MAX_SPLITS=MAX_SPLITS, num_warps=1)
    return out


@functools.cache
def _key_bytes(device: torch.device) -> int:
    is_turing = device.type == "cuda" and torch.cuda.get_device_capability(device) == (7, 5)
    return TURING_KEY_BYTES if is_turing else KEY_BYTES


def num_splits(count: int) -> int:
    """Parts of the keys of each of so many (sequence, key head) pairs."""
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * count <= PROGRAMS:
        splits *= 2
    return splits


@jit_of_any("by_slot", "splits")
def _attend(
    query, key, value, keys, values, table, lengths, parts, sums, scaling, window,
    by_page, by_head, by_token, by_slot, splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    b, h, s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, kv_heads = tl.num_programs(0), tl.num_programs(1)
    length = tl.load(lengths + b).to(tl.int32)
    # The new token is one of the window's.
    first = tl.where(window > 0, tl.maximum(length + 1 - window, 0), 0)
    share = tl.cdiv(tl.cdiv(length - first, splits), KEYS) * KEYS
    begin = first + s * share
    end = tl.minimum(length, begin + share)
    rows, dims, places = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, KEYS)
    is_row = rows < GROUP
    heads = kv_heads * GROUP
    at_query = (b * heads + h * GROUP + rows[:, None]) * DIM + dims[None, :]
    q = tl.load(query + at_query, mask=is_row[:, None], other=0.0)  # [ROWS, DIM]

    largest = tl.full((ROWS,), -1e38, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    if s == 0:  # the new token
        at_new = (b * kv_heads + h) * DIM + dims
        k_new, v_new = tl.load(key + at_new), tl.load(value + at_new)
        page = tl.load(table + b * by_slot + length // PAGE).to(tl.int64)
        at_end = page * by_page + h * by_head + length % PAGE * by_token + dims
        tl.store(keys + at_end, k_new)
        tl.store(values + at_end, v_new)
        largest = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scaling
        total = tl.full((ROWS,), 1.0, tl.float32)
        mixed = tl.zeros((ROWS, DIM), tl.float32) + v_new.to(tl.float32)[None, :]
    for start in range(begin, end, KEYS):
        at = start + places
        inside = at < end
        pages = tl.load(table + b * by_slot + at // PAGE, mask=inside, other=0).to(tl.int64)
        at_key = (pages * by_page + h * by_head + at % PAGE * by_token)[:, None] + dims[None, :]
        k = tl.load(keys + at_key, mask=inside[:, None], other=0.0)
        v = tl.load(values + at_key, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling  # of float32: no tf32
        scores = tl.where(inside[None, :], scores, -1e38)
        new = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - new)
        weights = tl.where(inside[None, :], tl.exp(scores - new[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new
    at_part = (s * batch + b) * heads + h * GROUP + rows
    if IS_WHOLE:
        mixed = mixed / total[:, None]
    else:
        tl.store(sums + at_part * 2, largest, mask=is_row)
        tl.store(sums + at_part * 2 + 1, total, mask=is_row)
    at_mixed = parts + at_part[:, None] * DIM + dims[None, :]
    tl.store(at_mixed, mixed.to(parts.dtype.element_ty), mask=is_row[:, None])


@jit_of_any("splits")
def _join(parts, sums, out, splits, DIM: tl.constexpr, MAX_SPLITS: tl.constexpr):
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, heads = tl.num_programs(0), tl.num_programs(1)
    parts_of_one, dims = tl.arange(0, MAX_SPLITS), tl.arange(0, DIM)
    inside = parts_of_one < splits
    at = (parts_of_one.to(tl.int64) * batch + b) * heads + h
    largest = tl.load(sums + at * 2, mask=inside, other=-1e38)
    total = tl.load(sums + at * 2 + 1, mask=inside, other=0.0)
    weight = tl.exp(largest - tl.max(largest, 0))
    mixed = tl.load(
        parts + at[:, None] * DIM + dims[None, :], mask=inside[:, None], other=0.0
    )  # [MAX_SPLITS, DIM]
    result = tl.sum(mixed * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + (b * heads + h) * DIM + dims, result.to(out.dtype.element_ty))
