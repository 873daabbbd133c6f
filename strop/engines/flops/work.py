"""Floating-point operations of the passes over packed rows, from the sizes of a model.

Counted is what has to be computed: products with weights, and attention over the tokens that a query sees, with
what rows share once. A multiplication and an addition are two. Recomputation (gradient checkpointing), norms and
activations do not count, as in the model FLOPs utilization of Chowdhery et al. 2022, arXiv:2204.02311, appendix B.

    forward    2 (D N + H M) + sum over layers of 2 h (d_k + d_v) P
    training   three times as much; weights that stay as they are (below an adapter) need two thirds

with D weights that a token goes through (of experts those that it is sent to), N packed tokens, H weights of the head,
M predicted tokens (once for rows that share both them and all before), h heads of sizes d_k and d_v, and P pairs of a
token and one that it sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from strop.engines.causal_lm import CausalLM
from strop.engines.segments import Segment
from strop.engines.tokens import Tokens

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """The sizes that the operations of a model follow from."""

    dense: float
    """Weights that each token goes through, embeddings and head excepted."""
    dense_trained: float
    """Weights among them that are trained."""
    head: float
    """Weights of the head."""
    head_trained: float
    layers: tuple[tuple[int, int | None], ...]
    """Of each attention layer: heads times (size of keys + size of values), and how many tokens a query sees; None:
    all."""

    def forward(self, tokens: Tokens) -> float:
        """Operations of a forward pass over a micro-batch; none without a token that is predicted."""
        num_predicted = len(tokens.targets)
        if not num_predicted:
            return 0.0
        return 2 * (self.dense * tokens.num_tokens + self.head * num_predicted) + self.attention(tokens)

    def training(self, tokens: Tokens) -> float:
        """Operations of a forward and a backward pass."""
        num_predicted = len(tokens.targets)
        if not num_predicted:
            return 0.0
        of_weights = 2 * (self.dense_trained * tokens.num_tokens + self.head_trained * num_predicted)
        return 2 * self.forward(tokens) + of_weights + self.attention(tokens)

    def attention(self, tokens: Tokens) -> float:
        """Operations of scores and weighted values."""
        segments = tokens.attention.segments
        pairs = {window: num_pairs(segments, window) for window in {window for _, window in self.layers}}
        return float(sum(2 * size * pairs[window] for size, window in self.layers))


def model_work(model: CausalLM) -> ModelWork | None:
    """The sizes of a model; None where its layers do more than weights and attention say (linear attention, images), or
    differ in their sizes."""
    config = model.config.get_text_config()
    kinds = None if getattr(config, "is_heterogeneous", False) else _kinds(config)
    sizes = None if kinds is None else _head_sizes(config)
    if kinds is None or sizes is None or model.media is not None:
        return None
    named = [
        (name, module, parameter)
        for name, module in model.module.named_modules()
        for parameter in module.parameters(recurse=False)
    ]
    dense = trained = head = head_trained = 0.0
    head_id = id(_head_parameter(model))
    for name, module, parameter in named:
        if parameter.dim() < 2:
            continue
        if id(parameter) == head_id:  # tied to the embeddings it comes twice
            head = float(parameter.numel())
            head_trained = head * parameter.requires_grad
        elif not isinstance(module, nn.Embedding):
            share = _share(name, config)
            dense += share * parameter.numel()
            trained += share * parameter.numel() * parameter.requires_grad
    return ModelWork(
        dense=dense,
        dense_trained=trained,
        head=head,
        head_trained=head_trained,
        layers=tuple((sizes, window) for window in kinds),
    )


def num_pairs(segments: Sequence[Segment], window: int | None) -> int:
    """Pairs of a token and one that it sees, itself included."""
    return sum(
        _sum_seen(segment.num_keys, window) - _sum_seen(segment.num_keys - segment.length, window)
        for segment in segments
    )


def _sum_seen(length: int, window: int | None) -> int:
    """min(1, w) + min(2, w) + ... + min(length, w)."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _kinds(config: object) -> list[int | None] | None:
    """Tokens that a query of each layer sees; None for a kind of layer that is not attention over tokens."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return None
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        is_used = getattr(config, "use_sliding_window", True)
        return [window if is_used else None] * count
    return (
        [window if kind == _SLIDING else None for kind in kinds] if set(kinds) <= {_FULL, _SLIDING} else None
    )


def _head_sizes(config: object) -> int | None:
    """Heads times (size of keys + size of values); None where the configuration does not say."""
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int):
        return None
    size = getattr(config, "head_dim", None) or width // heads
    keys = getattr(config, "qk_head_dim", None) or size
    values = getattr(config, "v_head_dim", None) or size
    return int(heads * (keys + values))


def _share(name: str, config: object) -> float:
    """Share of the tokens that go through a weight: of experts, as many as are chosen."""
    experts = next(
        (
            value
            for key in ("num_experts", "num_local_experts", "n_routed_experts")
            if (value := getattr(config, key, None))
        ),
        None,
    )
    is_expert = ".experts" in name and "shared_expert" not in name
    if not is_expert or not experts:
        return 1.0
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None) or experts
    return float(chosen) / float(experts)


def _head_parameter(model: CausalLM) -> nn.Parameter | None:
    """The parameter of the head, tied to the embeddings or not."""
    module: Any = model.module
    head = module.get_output_embeddings()
    head = getattr(module, "score", None) if head is None else head
    return None if head is None else head.weight
