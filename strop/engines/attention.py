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

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from strop.engines.attention_buckets import (
    Bucket,
    attend_by_formula,
    causal_mask,
    fused,
    gather,
    group_by_length,
    make_bucket,
)
from strop.engines.attention_form import AttentionContext, AttentionForm
from strop.engines.cpu.attention import CpuPlan, cpu_plan
from strop.engines.segments import Places, Segment
from strop.engines.varlen import VarlenPlan, half_of, runs_on, varlen_plan
from strop.utils.device import sent

ATTENTION_NAME = "strop_packed"
"""Name under which the attention function is registered with transformers."""
FORMULA_NAME = "strop_packed_formula"
"""The same, computed by the formula in every layer (model.attn_implementation=eager)."""


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
    def one_call(self) -> VarlenPlan | None:
        """Plan of the one call of FlashAttention that computes all segments of a layer in half precision; None where
        there is none."""
        return self._varlen if runs_on(self.device) else None

    @property
    def buckets(self) -> list[Bucket]:
        """The calls of a layer."""
        return self._buckets[0]

    @cached_property
    def _buckets(self) -> tuple[list[Bucket], Tensor]:
        """The calls, and where each query is in their joined outputs [N]."""
        buckets, tokens, slots, base = [], [], [], 0
        for group in group_by_length(self.segments):
            bucket, token_of_slot, valid = make_bucket(group, self.device, self._places)
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # each plan has other buckets
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
                out = fused(queries, keys, values, mask, form)  # [b, H, q, Dv]
            else:
                out = attend_by_formula(queries, keys, values, mask, form)
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
                    causal_mask(
                        b.prefix, b.lengths, b.shape[1:], b.blocks, window=form.window, chunk=form.chunk
                    ),
                    self.device,
                )
                for b in self.buckets
            ]
        return self._masks[sizes][number]


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
            "this model runs on packed tokens: call it through strop.engines.causal_lm.CausalLM, which passes the "
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
    # Squeezed and not indexed: the gradient of an index is put into zeros.
    queries, keys, values = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    output = strop_context.attend(layer, queries, keys, values, form)
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionInterface.register(FORMULA_NAME, partial(_attention, by_formula=True))


def _chunk(module: Any, layer: int) -> int | None:
    """Tokens of a chunk, which transformers gives to the mask of a layer and not to its attention."""
    config: Any = getattr(module, "config", None)
    kinds, size = getattr(config, "layer_types", None), getattr(config, "attention_chunk_size", None)
    if kinds is None or size is None:  # a compiler that sees the number of a layer makes a function for each
        return None
    return int(size) if kinds[layer] == "chunked_attention" else None


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
