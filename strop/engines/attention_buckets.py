"""Buckets: segments of similar shape that one call of attention computes together, padded to the longest.

Scaled dot products go to a fused kernel; scores with a cap or a sink, or model.attn_implementation=eager, follow the
formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from strop.engines.attention_form import AttentionForm
from strop.engines.segments import Places, Segment
from strop.utils.device import sent

BUCKET_PADDING = 1.25
"""A bucket's score matrix has at most this many times the entries that its segments need ..."""
SMALL_BUCKET = 1 << 15
"""... and this many more, which cost less than the call of a bucket of their own."""
FORMULA_SCORES = 1 << 24
"""Scores held at one time by layers that no fused kernel computes: 64 MiB in float32. Beyond it they are computed
again in the backward pass."""


@dataclass(frozen=True)
class Bucket:
    """Index tensors of one attention call: b segments, q query and k key positions each."""

    query_index: Tensor  # [b * q], into the queries; padding repeats query 0
    key_index: Tensor | None  # [b * k]; None: the keys are the queries' own tokens
    shape: tuple[int, int, int]  # b, q, k
    mask: Tensor | None  # [b, 1, q, k] bool; None: plain causal
    prefix: Tensor  # [b, 1], keys before the first query
    lengths: Tensor  # [b, 1], queries
    blocks: Tensor | None  # [b, q], number of the block of each query, -1 outside; None without any


_KERNELS_WITH_MASK = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of buckets on CUDA. cuDNN's is left out: it plans every new shape for seconds, and buckets have new ones in
nearly every micro-batch."""


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: AttentionForm) -> Tensor:
    """Attention output [b, H, q, Dv] by a fused kernel; arguments as of `attend_by_formula`."""
    heads, kv_heads = query.shape[1], key.shape[1]
    is_causal, scale = mask is None, form.scaling
    if query.device.type != "cuda":
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=heads != kv_heads
        )
    # The kernel that takes a mask has no heads that share keys.
    key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
    with sdpa_kernel(_KERNELS_WITH_MASK):
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)


def attend_by_formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: AttentionForm
) -> Tensor:
    """Attention output [b, H, q, Dv] of a form that no fused kernel has, a bounded number of scores at a time.

    Args:
        query, key, value: [b, H, q, D], [b, Hkv, k, D] and [b, Hkv, k, Dv].
        mask: [b, 1, q, k] bool of what may be seen; None: plain causal, with q = k.
        form: of the layer.
    """
    b, heads, q, dim = query.shape
    kv_heads, k = key.shape[1:3]
    queries = (query * form.scaling).view(b, kv_heads, heads // kv_heads, q, dim)
    if mask is None:
        mask = torch.ones(q, k, dtype=torch.bool, device=query.device).tril()[None, None]
    added = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    added.masked_fill_(~mask, float("-inf"))

    def some(queries: Tensor, added: Tensor) -> Tensor:
        scores = queries @ key.unsqueeze(2).transpose(-1, -2)  # [b, Hkv, G, q', k]
        return form.weights(scores, added.unsqueeze(2)).to(value.dtype) @ value.unsqueeze(2)

    step = max(1, FORMULA_SCORES // (b * heads * k))
    if step >= q:
        return some(queries, added).view(b, heads, q, -1)
    parts = [
        checkpoint(some, queries[..., i : i + step, :], added[..., i : i + step, :], use_reentrant=False)
        for i in range(0, q, step)
    ]
    return torch.cat(parts, dim=-2).view(b, heads, q, -1)


def gather(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index]. An embedding's backward pass is parallel and deterministic on a CPU; index_select's is serial."""
    return F.embedding(index, rows)


def group_by_length(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments of similar shape together; those with keys before the first query apart from those without.

    Ordered by the power of 4/3 that their length reaches, then by their keys, so that neighbours are alike in
    both; a group takes the next one while its padded score matrix stays within the bound.
    """
    ordered = sorted(
        (s for s in segments if s.length > 0),
        key=lambda s: (_has_keys_before(s), int(math.log(s.length, 4 / 3)), s.num_keys, s.length),
        reverse=True,
    )
    groups: list[list[Segment]] = []
    q = k = used = 0  # of the last group: longest query, most keys, entries needed
    for segment in ordered:
        area = segment.length * segment.num_keys
        if groups and _has_keys_before(groups[-1][0]) == _has_keys_before(segment):
            wide, deep = max(q, segment.length), max(k, segment.num_keys)
            padded = (len(groups[-1]) + 1) * wide * deep
            if padded <= BUCKET_PADDING * (used + area) + SMALL_BUCKET:
                groups[-1].append(segment)
                q, k, used = wide, deep, used + area
                continue
        groups.append([segment])
        q, k, used = segment.length, segment.num_keys, area
    return groups


def _has_keys_before(segment: Segment) -> bool:
    return segment.num_keys > segment.length


def make_bucket(
    group: list[Segment], device: torch.device, places: Places | None
) -> tuple[Bucket, Tensor, Tensor]:
    """The bucket of these segments; in host memory the query of each slot [b * q], and which [b, q] hold one."""
    table = torch.tensor([(s.start, s.length, s.num_keys - s.length) for s in group])
    starts, lengths, before = table[:, :, None].unbind(1)  # [b, 1] each
    q, k = int(lengths.max()), int((before + lengths).max())
    at_query = torch.arange(q)[None]
    valid = at_query < lengths
    query_index = torch.where(valid, starts + at_query, 0).flatten()
    key_index = mask = None
    blocks = _block_numbers(group, q)
    if int(before.max()) > 0 or places is not None:
        of_segments = np.zeros((len(group), k), dtype=np.int64)
        for row, segment in enumerate(group):
            of_segments[row, : segment.num_keys] = segment.keys()
        key_index = torch.from_numpy(of_segments).flatten()
    if int(before.max()) > 0 or blocks is not None:
        mask = sent(causal_mask(before, lengths, (q, k), blocks), device)
    if places is not None:
        query_index = places.queries[query_index].masked_fill(~valid.flatten(), 0)
        key_index = None if key_index is None else places.keys[key_index]
    bucket = Bucket(
        query_index=sent(query_index, device),
        key_index=None if key_index is None else sent(key_index, device),
        shape=(len(group), q, k),
        mask=mask,
        prefix=before,
        lengths=lengths,
        blocks=blocks,
    )
    return bucket, query_index, valid


def _block_numbers(group: Sequence[Segment], num_queries: int) -> Tensor | None:
    """[b, q]: number of the block that each query of a segment lies in, -1 outside of all; None where none has any."""
    if not any(segment.blocks for segment in group):
        return None
    numbers = torch.full((len(group), num_queries), -1)
    for row, segment in enumerate(group):
        for number, (start, end) in enumerate(segment.blocks):
            numbers[row, start:end] = number
    return numbers


def causal_mask(
    prefix: Tensor,
    lengths: Tensor,
    shape: tuple[int, int],
    blocks: Tensor | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """[b, 1, q, k] bool: key at or before the query or in its block, within window and chunk; padding rows see key 0
    alone."""
    q, k = shape
    at_key = torch.arange(k)[None, None]  # [1, 1, k]
    at_query = prefix[:, :, None] + torch.arange(q)[None, :, None]  # [b, q, 1]
    mask = at_key <= at_query
    if blocks is not None:
        own = at_key[0] - prefix  # [b, k], place of a key among the queries' own tokens
        of_key = blocks.gather(1, own.clamp(0, q - 1)).masked_fill((own < 0) | (own >= lengths), -1)
        mask = mask | (blocks[:, :, None] == of_key[:, None]) & (of_key >= 0)[:, None]
    if window is not None:
        mask = mask & (at_key > at_query - window)
    if chunk is not None:
        mask = mask & (at_key // chunk == at_query // chunk)
    padding = at_query >= (prefix + lengths)[:, :, None]
    return torch.where(padding, at_key == 0, mask).unsqueeze(1)
