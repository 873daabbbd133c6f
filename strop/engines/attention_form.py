"""Attention of a layer: its form, and the context of a forward pass that computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


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


class AttentionContext(Protocol):
    """Attention on the queries, keys and values of one layer; given to the model's forward call."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attention output [N, H, Dv] for query [N, H, D], key [N, Hkv, D] and value [N, Hkv, Dv]."""
        ...
