"""Layers of Llama's form: root-mean-square norms, rotary positions, grouped heads, a gated feed-forward part."""

from __future__ import annotations

from typing import Any

from torch import nn

from strop.engines.attention import FORMULA_NAME
from strop.engines.causal_lm import CausalLM

LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
"""Classes of transformers whose forward pass this is."""
ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not follow the longest sequence of a batch."""


def has_plain_layers(model: CausalLM) -> bool:
    """True if all layers have this form, and attention is not to be computed by its formula."""
    backbone: Any = model.module.base_model
    layers = list(getattr(backbone, "layers", ()))
    rope = getattr(getattr(backbone, "rotary_emb", None), "rope_type", "")
    if model.media is not None or model.config._attn_implementation == FORMULA_NAME:
        return False
    if not layers or any(type(layer).__name__ not in LAYERS for layer in layers) or rope not in ROPES:
        return False
    return model.config.hidden_act == "silu" and all(map(_is_plain, layers))


def _is_plain(layer: Any) -> bool:
    """Its projections are ordinary ones, without adapters, with biases in all or none of those that are joined."""
    attention, mlp = layer.self_attn, layer.mlp
    joined = [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]
    parts = [*joined[0], *joined[1], attention.o_proj, mlp.down_proj]
    if any(type(part) is not nn.Linear for part in parts):
        return False
    return all(len({part.bias is None for part in parts}) == 1 for parts in joined)


def window_of(layer: Any, model: CausalLM) -> int | None:
    """Tokens that a query of this layer looks back on, itself included; None: all."""
    if type(layer).__name__ == "MistralDecoderLayer":
        window: int | None = model.config.sliding_window
    else:
        window = getattr(layer.self_attn, "sliding_window", None)
    return window or None
