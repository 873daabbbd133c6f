"""Hidden states of a decode step on a card, for layers of Llama's form: of many sequences nine launches of a layer.

The model's own forward pass has fifteen, and two more where queries and keys are normed. Here queries, keys and values
are one product, as are gates and ups: their weights lie one behind the other, in the memory of one tensor. What is
between products are the kernels of layer_kernels.py. Every other model, one whose weights are trained in this process
without a rounded copy, and a card without Triton go through the model's own forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.engines.attention_form import AttentionForm
from strop.engines.causal_lm import CausalLM
from strop.engines.fused_norms import norm_eps
from strop.rollout.native.cache import DecodeAttention
from strop.rollout.native.layer_kernels import MAX_DIM, add_and_norm, gate_halves, turn_heads
from strop.rollout.native.plain_layers import has_plain_layers, window_of
from strop.utils.triton import has_kernels


@dataclass(frozen=True)
class _Weights:
    """Weights [N, K] and biases [N] of products with the same input, the rows of one behind those of the other."""

    qkv: Tensor
    qkv_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None


class FusedLayers:
    """The layers of a model, whose weights of products are frozen and of the precision of products."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._layers: list[Any] = model.layers
        self._weights: list[_Weights] = []
        self._addresses: list[int] = []

    @torch.inference_mode(False)
    @torch.no_grad()
    def join(self) -> None:
        """Move weights of products with the same input one behind the other, unless the last call has; parameters go
        with them."""
        if self._weights and self._addresses == self._parameter_addresses():
            return
        self.free()
        for layer in self._layers:
            qkv, gate_up = (_join(group) for group in _groups(layer))
            self._weights.append(_Weights(*qkv, *gate_up))
        self._addresses = self._parameter_addresses()

    def _parameter_addresses(self) -> list[int]:
        parts = [part for layer in self._layers for group in _groups(layer) for part in group]
        return [parameter.data_ptr() for part in parts for parameter in part.parameters()]

    def free(self) -> None:
        """Hold no memory beside the parameters."""
        self._weights.clear()
        self._addresses.clear()

    def hidden(self, ids: Tensor, positions: Tensor, attention: DecodeAttention) -> Tensor:
        """Final hidden states [B, D] behind one token of each sequence; after `join`.

        Args:
            ids, positions: [B] of the tokens.
            attention: of the sequences.
        """
        backbone: Any = self._model.module.base_model
        dtype = self._model.compute_dtype
        stream: Tensor = backbone.embed_tokens(ids)
        angles = [part[0].contiguous() for part in backbone.rotary_emb(stream[None], positions[None])]
        delta = None
        for number, (layer, weights) in enumerate(zip(self._layers, self._weights, strict=True)):
            attend, mlp = layer.self_attn, layer.mlp
            states = _normed(stream, delta, layer.input_layernorm, dtype)
            states = F.linear(states, weights.qkv, weights.qkv_bias)
            form = AttentionForm(scaling=attend.scaling, window=window_of(layer, self._model))
            mixed = attention.attend(number, *_heads(states, attend, angles), form)
            delta = F.linear(mixed.flatten(1), attend.o_proj.weight, attend.o_proj.bias)
            states = _normed(stream, delta, layer.post_attention_layernorm, dtype)
            gated = gate_halves(F.linear(states, weights.gate_up, weights.gate_up_bias))
            delta = F.linear(gated, mlp.down_proj.weight, mlp.down_proj.bias)
        wide = torch.promote_types(stream.dtype, backbone.norm.weight.dtype)
        return _normed(stream, delta, backbone.norm, wide)


def fused_layers(model: CausalLM) -> FusedLayers | None:
    """The layers of a model; None where its own forward pass is needed."""
    if not has_kernels(model.device) or model.is_sharded:
        return None
    if not has_plain_layers(model) or not _fits(model):
        return None
    layers: list[Any] = model.layers
    parts = [part for layer in layers for part in (*layer.self_attn.children(), *layer.mlp.children())]
    weights = [weight for part in parts if isinstance(part, nn.Linear) for weight in part.parameters()]
    is_held = all(not weight.requires_grad and weight.dtype == model.compute_dtype for weight in weights)
    return FusedLayers(model) if is_held else None


def _fits(model: CausalLM) -> bool:
    """Sizes and precisions that the kernels are for."""
    layer: Any = model.layers[0]
    dim: int = layer.self_attn.head_dim
    is_wide = torch.float64 in (model.compute_dtype, layer.input_layernorm.weight.dtype)
    return not is_wide and dim > 1 and dim & (dim - 1) == 0 and model.hidden_size <= MAX_DIM


def _groups(layer: Any) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """Products of a layer with the same input."""
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]


def _join(parts: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of linear layers."""
    weight = _in_one([part.weight for part in parts])
    return weight, None if parts[0].bias is None else _in_one([part.bias for part in parts])


def _in_one(parameters: Sequence[Tensor]) -> Tensor:
    """The rows of all in one tensor, in whose memory the parameters lie from now on."""
    whole = torch.cat([parameter.data for parameter in parameters])
    rows = torch.split(whole, [len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, rows, strict=True):
        parameter.data = part
    return whole


def _normed(stream: Tensor, delta: Tensor | None, norm: Any, dtype: torch.dtype) -> Tensor:
    return add_and_norm(stream, delta, norm.weight, norm_eps(norm), dtype)


def _heads(states: Tensor, attention: Any, angles: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the product of all three; `angles` are cosines and sines [B, D]."""
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    heads, kv_heads = (
        part.out_features // attention.head_dim for part in (attention.q_proj, attention.k_proj)
    )
    norms = None if query_norm is None or key_norm is None else (query_norm.weight, key_norm.weight)
    eps = 0.0 if query_norm is None else norm_eps(query_norm)
    cosines, sines = angles
    return turn_heads(states, norms, eps, cosines, sines, (heads, kv_heads))
