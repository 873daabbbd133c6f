"""Attention over packed sequences, behind the attention interface of Hugging Face models.

A forward pass sees one row of N tokens in which many sequences lie end to end. Which token may look at
which is not a mask of [N, N] but a plan: every segment (a run of tokens) names the earlier segments that
it continues, if any. So what several sequences begin with lies in the row once: the prompt of a group of
samples, which each sample's response continues, or the runs of a tree of any depth (prefix_tree.py).

The plan gathers segments of similar length into buckets and runs one scaled-dot-product attention per
bucket, forward and backward, on any device; where scores are capped or heads have sinks, which no fused kernel
offers on every device, or where the user asks for it, it follows the formula. Padding exists only inside these
calls, never in the linear layers. In half precision on CUDA one call of FlashAttention takes the place of the buckets
where it has the form (varlen.py). Last measured: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from strop.engines.cpu.attention import CpuPlan, cpu_plan
from strop.engines.varlen import VarlenPlan, half_of, runs_on, varlen_plan
from strop.utils.device import sent

ATTENTION_NAME = "strop_packed"
"""Name under which the attention function is registered with transformers."""
FORMULA_NAME = "strop_packed_formula"
"""The same, computed by the formula in every layer (model.attn_implementation=eager)."""

BUCKET_PADDING = 1.25
"""A bucket's score matrix has at most this many times the entries that its segments need ..."""
SMALL_BUCKET = 1 << 15
"""... and this many more, which cost less than the call of a bucket of their own."""
FORMULA_SCORES = 1 << 24
"""Scores held at one time by layers that no fused kernel computes: 64 MiB in float32. Beyond it they are computed
again in the backward pass."""


@dataclass(frozen=True, kw_only=True)
class AttentionForm:
    """Attention of a layer, besides that to what came before.

    A query's weights are softmax(cap(q K^T scaling)) over the keys it may see, and a sink beside them where its head
    has one: sinks take weight and give no value.
    """

    scaling: float
    """Factor of the scores."""
    window: int | None = None
    """Tokens that a query looks back on, itself included; None: all."""
    chunk: int | None = None
    """Sequences are cut into runs of this many tokens, and a query sees those of its own run alone; None: not cut
    (Llama 4)."""
    softcap: float | None = None
    """Scores s become softcap tanh(s / softcap) (Gemma 2, arXiv:2408.00118, section 2)."""
    sinks: Tensor | None = None
    """[H]: score of each head's sink (gpt-oss, arXiv:2508.10925)."""
    by_formula: bool = False
    """Computed by the formula, although a fused kernel has this form too."""

    @property
    def sees_all(self) -> bool:
        """A query sees every earlier token."""
        return self.window is None and self.chunk is None

    @property
    def is_fused(self) -> bool:
        """Scaled dot products with a mask are all of it, and a fused kernel computes them."""
        return self.softcap is None and self.sinks is None and not self.by_formula

    def weights(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Attention weights [..., Hkv, G, q, k], in at least float32, of scaled scores of that shape.

        Args:
            scores: of G query heads for each key head.
            mask: added to them, 0 or -inf; of a shape that broadcasts.
        """
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores + mask
        wide = torch.promote_types(scores.dtype, torch.float32)
        if self.sinks is None:
            return torch.softmax(scores, dim=-1, dtype=wide)
        sinks = self.sinks.view(*scores.shape[-4:-2], 1, 1).to(scores.dtype)
        with_sink = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        return torch.softmax(with_sink, dim=-1, dtype=wide)[..., :-1]


Span: TypeAlias = tuple[int, int]
"""[start, end) of tokens."""


class AttentionContext(Protocol):
    """Attention on the queries, keys and values of one layer; given to the model's forward call."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attention output [N, H, Dv] for query [N, H, D], key [N, Hkv, D] and value [N, Hkv, Dv]."""
        ...


class NoContext(ValueError):
    """Packed attention was called without its context."""


_UNSUPPORTED = ("sinks", "head_mask", "position_bias")


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    strop_context: AttentionContext | None = None,
    strop_positions: Tensor | None = None,
    by_formula: bool = False,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: [1, H, N, D] in, [1, N, H, D] out."""
    if strop_context is None:
        raise NoContext(
            "this model runs on packed tokens: call it through strop.engines.model.CausalLM, which passes the "
            "attention context; a plain forward call needs attn_implementation='sdpa'"
        )
    for name in _UNSUPPORTED:
        if extra.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} uses attention option {name!r}, which packed attention does not "
                f"have; choose a model without it"
            )
    layer: int = module.layer_idx  # type: ignore[assignment]
    if strop_positions is not None:
        query = _tempered(module, query, strop_positions)
    form = AttentionForm(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        chunk=_chunk(module, layer),
        softcap=softcap,
        sinks=s_aux,
        by_formula=by_formula,
    )
    output = strop_context.attend(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), form
    )
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionInterface.register(FORMULA_NAME, partial(_attention, by_formula=True))


def _chunk(module: Any, layer: int) -> int | None:
    """Tokens of a chunk, which transformers gives to the mask of a layer and not to its attention."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    chunked = kinds is not None and kinds[layer] == "chunked_attention"
    return config.attention_chunk_size if chunked else None


def _tempered(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Queries [1, H, N, D] as they would be at their positions [1, N].

    Layers of Llama 4 without rotary embeddings multiply queries by 1 + a log(1 + floor((p + 1) / b)), and take the
    index in the row for p.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    def factor(at: Tensor) -> Tensor:
        steps = torch.floor((at.float() + 1.0) / module.floor_scale)
        return torch.log1p(steps) * float(module.attn_scale) + 1.0

    at_index = torch.arange(query.shape[2], device=query.device)
    change: Tensor = (factor(positions[0]) / factor(at_index)).to(query.dtype)
    return query * change[None, None, :, None]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of tokens in the packed row."""

    start: int
    """Index of its first token in the row."""
    length: int
    """Number of tokens."""
    prefix: tuple[Span, ...] = ()
    """Runs of the row that it continues, from the beginning of its sequence on; none where it begins one."""
    blocks: tuple[Span, ...] = ()
    """Runs of its tokens, counted from its first one, that see each other whatever their order: images of models that
    read these in both directions (Gemma 3)."""

    @cached_property
    def num_keys(self) -> int:
        """Tokens that its last token sees."""
        return sum(end - start for start, end in self.prefix) + self.length

    def keys(self) -> NDArray[np.int64]:
        """[num_keys], places of these tokens in the row, in the order of the sequence."""
        runs = (*self.prefix, (self.start, self.start + self.length))
        return np.concatenate([np.arange(start, end) for start, end in runs])


@dataclass(frozen=True)
class Places:
    """Places of the tokens of a row of N on a rank that has the queries of some, and keys and values of all; in host
    memory."""

    queries: Tensor
    """[N] int64: place among the rank's own tokens, which lie in the order of its segments; 0 of other tokens."""
    keys: Tensor
    """[N] int64: place among the keys and values."""


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


class PackedAttention:
    """Causal attention within each segment and to those that it continues."""

    def __init__(
        self, segments: Sequence[Segment], *, device: torch.device, places: Places | None = None
    ) -> None:
        """Plan for segments that cover all queries.

        Args:
            segments: in places of the row.
            device: of queries, keys and values.
            places: of tokens among the queries and among the keys; None: both are the row itself.
        """
        self.segments = tuple(segments)
        self.device = device
        self._places = places
        self._masks: dict[tuple[int | None, int | None], list[Tensor]] = {}

    def prepare(self) -> None:
        """Make the index tensors of the calls now, which else happens in the first layer."""
        if runs_on(self.device):
            _ = self._varlen
        elif self._cpu is None:
            _ = self._buckets

    @property
    def buckets(self) -> list[Bucket]:
        """The calls of a layer."""
        return self._buckets[0]

    @cached_property
    def _buckets(self) -> tuple[list[Bucket], Tensor]:
        """The calls, and where each query is in their joined outputs [N]."""
        buckets, tokens, slots, base = [], [], [], 0
        for group in _group_by_length(self.segments):
            bucket, token_of_slot, valid = _make_bucket(group, self.device, self._places)
            buckets.append(bucket)
            at_slot = torch.nonzero(valid.flatten())[:, 0]
            tokens.append(token_of_slot[at_slot])
            slots.append(base + at_slot)
            base += valid.numel()
        order = torch.argsort(torch.cat(tokens))
        return buckets, sent(torch.cat(slots)[order], self.device)

    @cached_property
    def _varlen(self) -> VarlenPlan | None:
        return varlen_plan(self.segments, self.device, self._places)

    @cached_property
    def _cpu(self) -> CpuPlan | None:
        is_here = self.device.type == "cpu" and self._places is None
        return cpu_plan(self.segments) if is_here else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attention output [N, H, Dv] for query [N, H, D], key [N, Hkv, D] and value [N, Hkv, Dv]; with places there
        are fewer queries than keys."""
        half = half_of(query, value, form)
        if half is not None and (plan := self._varlen) is not None:
            return plan.attend(query.to(half), key.to(half), value.to(half), form)
        output = None if self._cpu is None else self._cpu.attend(query, key, value, form)
        return self._attend_in_buckets(query, key, value, form) if output is None else output

    def _attend_in_buckets(self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        heads, (kv_heads, dim), value_dim = query.shape[1], key.shape[1:], value.shape[2]
        query_rows = query.reshape(-1, heads * dim)
        # One gather moves keys and values together.
        key_value_rows = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
        outputs = []
        for number, bucket in enumerate(self.buckets):
            b, q, k = bucket.shape
            queries = gather(query_rows, bucket.query_index).view(b, q, heads, dim).transpose(1, 2)
            index = bucket.query_index if bucket.key_index is None else bucket.key_index
            gathered = gather(key_value_rows, index).view(b, k, -1)
            keys, values = torch.split(gathered, [kv_heads * dim, kv_heads * value_dim], dim=-1)
            keys = keys.view(b, k, kv_heads, dim).transpose(1, 2)
            values = values.view(b, k, kv_heads, value_dim).transpose(1, 2)
            mask = bucket.mask if form.sees_all else self._mask(form, number)
            if form.is_fused:
                out = _fused(queries, keys, values, mask, form)  # [b, H, q, Dv]
            else:
                out = _attend_by_formula(queries, keys, values, mask, form)
            outputs.append(out.transpose(1, 2).reshape(b * q, heads * value_dim))
        return self.joined(outputs).view(-1, heads, value_dim)

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """Values of the queries, [N, D], from those of each bucket, [b * q, D]."""
        return gather(outputs[0] if len(outputs) == 1 else torch.cat(outputs), self._buckets[1])

    def _mask(self, form: AttentionForm, number: int) -> Tensor:
        """Mask of a bucket for layers with a window or chunks, made once for each size of them."""
        sizes = form.window, form.chunk
        if sizes not in self._masks:
            self._masks[sizes] = [
                sent(
                    _causal_mask(
                        b.prefix, b.lengths, b.shape[1:], b.blocks, window=form.window, chunk=form.chunk
                    ),
                    self.device,
                )
                for b in self.buckets
            ]
        return self._masks[sizes][number]


_KERNELS_WITH_MASK = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of buckets on CUDA. cuDNN's is left out: it plans every new shape for seconds, and buckets have new ones in
nearly every micro-batch."""


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: AttentionForm) -> Tensor:
    """Attention output [b, H, q, Dv] by a fused kernel; arguments as of `_attend_by_formula`."""
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


def _attend_by_formula(
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


def _group_by_length(segments: Sequence[Segment]) -> list[list[Segment]]:
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


def _make_bucket(
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
        mask = sent(_causal_mask(before, lengths, (q, k), blocks), device)
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


def _causal_mask(
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
