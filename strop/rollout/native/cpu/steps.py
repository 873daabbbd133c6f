"""Decode steps and prefills of the common architecture in C, for a CPU: one call for all layers.

Layers of Llama's form (plain_layers.py) are computed by decode.c, instead of about fifty operations of torch from a
layer's Python. Every other model, and a machine without gcc, goes through its own forward pass. Last measured:
benchmarks/RESULTS.md.

Packed weights are copies, in the precision of the products: they are made again when a parameter is another one, when
the model says that its weights have changed, and for a new policy version, and are given back with the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from strop.engines.causal_lm import CausalLM
from strop.engines.head import Head
from strop.rollout.native.cache import SlotCache
from strop.rollout.native.cpu.kernel import DecodeKernel, Layer, compiled, slots_of
from strop.rollout.native.decode_steps import TOLERANCE, agrees
from strop.rollout.native.key_values import KeyValueCache
from strop.rollout.native.plain_layers import has_plain_layers, window_of

TABLE_POSITIONS = 512
"""The tables of cosines and sines grow by so many positions."""
PREFILL_ROWS = 256
"""Given tokens that go through all layers at a time, so that what lies between two products stays in a cache."""
CHECKED_TOKENS = 32
"""First tokens of a sequence, at most, of which all is compared with the model's own forward pass, once."""


@dataclass(frozen=True)
class Packed:
    """Projections side by side, as decode.c reads them."""

    panels: Tensor
    """[ceil(N / W), K, W]: W columns lie together, with zeros behind the last one; of bfloat16
    [ceil(N / W), K / 2, 2 W], both numbers of a column side by side."""
    bias: Tensor | None
    """[ceil(N / W) W] float32."""


def packed(parts: Sequence[nn.Linear | Head], dtype: torch.dtype, *, width: int) -> Packed:
    """Projections with the same input, packed.

    Args:
        parts: with biases in all or none.
        dtype: of the weights.
        width: W.
    """
    weight = torch.cat([part.weight.detach().to(dtype) for part in parts])
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    bias = _filled(torch.cat(biases).float(), width) if biases else None
    return Packed(_panels([weight], width), bias)


def packed_in_turn(parts: Sequence[nn.Linear | Head], dtype: torch.dtype, *, width: int) -> Packed:
    """Projections of the same width, each with its share of every panel; arguments as of `packed`."""
    share = width // len(parts)
    weights = [part.weight.detach().to(dtype).contiguous() for part in parts]
    biases = [_filled(part.bias.detach().float(), share) for part in parts if part.bias is not None]
    bias = torch.stack([each.view(-1, share) for each in biases], dim=1).flatten() if biases else None
    return Packed(_panels(weights, width), bias)


def _filled(rows: Tensor, multiple: int) -> Tensor:
    """With zeros behind the last one, up to a multiple."""
    missing = -len(rows) % multiple
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def _panels(weights: Sequence[Tensor], width: int) -> Tensor:
    """Panels of weights [N, K] of one shape, each of which has as many columns of every panel."""
    share = width // len(weights)
    # Two numbers of bfloat16 go together.
    pairs = [weight.view(torch.int32) if weight.dtype == torch.bfloat16 else weight for weight in weights]
    count, inner = -(-len(pairs[0]) // share), pairs[0].shape[1]
    panels = pairs[0].new_empty(count, inner, width)
    for number, rows in enumerate(pairs):
        columns = _filled(rows, share).view(count, share, inner).transpose(1, 2)
        panels[:, :, number * share : (number + 1) * share] = columns
    return panels.view(weights[0].dtype)


@dataclass(frozen=True)
class _Layer:
    """Packed weights and constants of one layer; vectors in float32."""

    qkv: Packed
    out: Packed
    gate_up: Packed
    down: Packed
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float
    scaling: float
    window: int
    next_norm: Tensor
    """Of what follows the attention."""
    next_layer_norm: Tensor
    """Of what follows this layer: the next one, or the head."""

    def at(self) -> Layer:
        """Addresses of its tensors, as decode.c reads them."""
        products = {name: getattr(self, name) for name in ("qkv", "out", "gate_up", "down")}
        norms = ("query_norm", "key_norm", "next_norm", "next_layer_norm")
        return Layer(
            **{name: product.panels.data_ptr() for name, product in products.items()},
            **{f"{name}_bias": _at(product.bias) for name, product in products.items()},
            **{name: _at(getattr(self, name)) for name in norms},
            window=self.window,
            eps=self.eps,
            scaling=self.scaling,
        )


class FusedStep:
    """Logits behind new tokens, computed in C: one of each running sequence, or those that requests begin with."""

    def __init__(self, model: CausalLM, kernel: DecodeKernel, head_kernel: DecodeKernel) -> None:
        self._model, self._kernel, self._head_kernel = model, kernel, head_kernel
        self._dtype = model.compute_dtype
        attention: Any = model.layers[0].self_attn
        self._num_layers, self._dim = len(model.layers), attention.head_dim
        self._kv_heads = attention.k_proj.out_features // attention.head_dim
        self._layers: list[_Layer] = []
        self._head: tuple[Head, Packed] | None = None
        self._at: ctypes.Array[Layer] = (Layer * 0)()
        self._made_of: list[tuple[int, int]] = []
        self._num_changes = 0
        self._is_current = False
        self._cosines = self._sines = torch.empty(0)
        self._room = torch.empty(0)
        self._is_checked = self._is_prefill_checked = False
        self.is_disabled = False
        """The first step or prefill gave something else than the model's own forward pass: none is tried again."""

    def free(self) -> None:
        """Give the memory of packed weights back."""
        self._layers.clear()
        self._head = None
        self._room = torch.empty(0)
        self._made_of.clear()
        self._is_current = False

    def weights_changed(self) -> None:
        """The weights may be others from now on."""
        self._is_current = False

    def logits(
        self,
        ids: Tensor,
        lengths: Tensor,
        positions: Tensor,
        cache: KeyValueCache,
        *,
        num_tokens: int,
        forward: Callable[[], Tensor],
    ) -> Tensor:
        """As strop.rollout.native.decode_steps.DecodeSteps has it; positions are lengths in models of text."""
        assert isinstance(cache, SlotCache), "what is compiled for a CPU reads slots"
        if self._is_checked:
            return self.computed(ids, lengths, cache, num_tokens=num_tokens)
        expected = forward()
        if not bool(expected.isfinite().all()):  # nothing to compare with
            return expected
        logits = self.computed(ids, lengths, cache, num_tokens=num_tokens)
        self._is_checked = True
        if agrees(logits, expected, self._dtype, what="logits of a compiled decode step"):
            return logits
        self._disable()
        if self._is_prefill_checked:
            raise RuntimeError(
                "a compiled decode step differs from the model's own forward pass, though the compiled prefill, whose "
                "keys and values the running sequences have, did not: they are given up, and later ones go through "
                "the model's own forward pass; model.attn_implementation=eager goes through it from the beginning"
            )
        return forward()  # what the other left in the cache is overwritten

    def computed(self, ids: Tensor, lengths: Tensor, cache: SlotCache, *, num_tokens: int) -> Tensor:
        """Logits [B, V] of the next token; arguments as of `logits`."""
        rows = np.arange(len(ids))
        tokens = np.stack([rows, lengths.numpy()], axis=1)
        sequences = slots_of(cache.table, len(ids))
        sources, sequences["num_shared"] = cache.shared(len(ids))
        sequences["shared_at"] = (sources - rows) * cache.table.stride(2)
        hidden = self._hidden(ids, sequences, tokens, rows, longest=num_tokens)
        return self._logits(hidden)

    def _disable(self) -> None:
        self.is_disabled = True
        self.free()

    def prefill(
        self,
        pieces: Sequence[tuple[Sequence[int], Tensor | None]],
        own: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, list[Tensor]] | None:
        """As strop.rollout.native.prefill.FusedPrefill has it."""
        if not self.is_disabled and not self._is_prefill_checked:
            self._check_prefill(pieces, own)
        return self._prefilled(pieces) if self._is_prefill_checked and not self.is_disabled else None

    def _check_prefill(
        self,
        pieces: Sequence[tuple[Sequence[int], Tensor | None]],
        own: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        """Compare the first tokens of one of these, if any begins a sequence with two: the first position turns
        nothing."""
        given = next(
            (ids[:CHECKED_TOKENS] for ids, prefix in pieces if prefix is None and len(ids) > 1), None
        )
        if given is None:
            return
        expected = own(torch.tensor(given))
        if not all(bool(part.isfinite().all()) for part in expected):  # nothing to compare with
            return
        logits, (table,) = self._prefilled([(given, None)])
        names = "logits", "keys and values"
        for found, wanted, name in zip((logits[0], table), expected, names, strict=True):
            if not agrees(found, wanted, self._dtype, what=f"{name} of a compiled prefill"):
                self._disable()
                return
        self._is_prefill_checked = True

    def _prefilled(
        self, pieces: Sequence[tuple[Sequence[int], Tensor | None]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Results of `prefill`."""
        ids = torch.tensor([token for piece, _ in pieces for token in piece])
        tables = [self._table(len(piece), prefix) for piece, prefix in pieces]
        sizes = np.array([len(piece) for piece, _ in pieces])
        ends = sizes.cumsum() - 1
        starts = np.array([table.shape[3] for table in tables]) - sizes
        places = np.arange(len(ids)) + (starts - (ends + 1 - sizes)).repeat(sizes)
        tokens = np.stack([np.arange(len(pieces)).repeat(sizes), places], axis=1)
        sequences = np.concatenate([slots_of(table[:, :, None], 1) for table in tables])
        longest = max(table.shape[3] for table in tables)
        hidden = []
        for first in range(0, len(ids), PREFILL_ROWS):
            rows = slice(first, first + PREFILL_ROWS)
            here = ends[(ends >= rows.start) & (ends < rows.stop)] - first
            hidden.append(self._hidden(ids[rows], sequences, tokens[rows], here, longest=longest))
        return self._logits(torch.cat(hidden)), tables

    def _table(self, count: int, prefix: Tensor | None) -> Tensor:
        """Room for keys and values [2, L, Hkv, T, D] of a prefix, which is there, and so many tokens behind it."""
        start = 0 if prefix is None else prefix.shape[3]
        table = torch.empty(2, self._num_layers, self._kv_heads, start + count, self._dim, dtype=self._dtype)
        if prefix is not None:
            table[:, :, :, :start] = prefix
        return table

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, V] of final hidden states [B, K]."""
        assert self._head is not None, "packed for the hidden states"
        head, packed_head = self._head
        products = self._head_kernel.multiply(
            hidden, packed_head.panels, packed_head.bias, width=len(head.weight)
        )
        return head.formed(products)

    def _hidden(
        self,
        ids: Tensor,
        sequences: NDArray[np.void],
        tokens: NDArray[np.int64],
        ends: NDArray[np.int64],
        *,
        longest: int,
    ) -> Tensor:
        """Final hidden states [E, K] float32 of the last ones of tokens [N]; arguments as of DecodeKernel.step."""
        self._refresh(longest)
        return self._kernel.step(
            self._at,
            self._first_norm,
            F.embedding(ids, self._embedding).float(),
            (self._cosines, self._sines),
            sequences,
            tokens,
            ends,
            inner=self._model.config.intermediate_size,
            longest=longest,
            room=self._room,
        )

    def _refresh(self, num_tokens: int) -> None:
        """See to weights that are those of the model, and to tables that are long enough."""
        module: Any = self._model.module
        # Looking at every parameter takes longer than the norms of a step.
        if not self._is_current or self._model.num_changes != self._num_changes:
            self._look()
        if len(self._cosines) < num_tokens:
            count = -(-num_tokens // TABLE_POSITIONS) * TABLE_POSITIONS
            like = torch.empty(1, 1, dtype=torch.float32)
            cosines, sines = module.base_model.rotary_emb(like, torch.arange(count)[None])
            self._cosines, self._sines = cosines[0].contiguous(), sines[0].contiguous()

    def _look(self) -> None:
        """Pack the weights again where a parameter has changed."""
        module: Any = self._model.module
        made_of = [
            (parameter.data_ptr(), parameter._version) for _, parameter in self._model.named_parameters()
        ]
        if made_of != self._made_of or self._model.num_changes != self._num_changes:
            self._layers = list(_layers_of(self._model, self._dtype, self._kernel.panel_width))
            self._at = (Layer * len(self._layers))(*(layer.at() for layer in self._layers))
            head = self._model.head
            self._head = head, packed([head], torch.float32, width=self._head_kernel.panel_width)
            self._embedding = module.get_input_embeddings().weight
            self._first_norm = _vector(module.base_model.layers[0].input_layernorm.weight)
            self._made_of, self._num_changes = made_of, self._model.num_changes
        self._is_current = True


def fused_step(model: CausalLM) -> FusedStep | None:
    """The step of a model; None where its own forward pass is needed."""
    is_here = model.device.type == "cpu" and not model.is_sharded and model.compute_dtype in TOLERANCE
    if not is_here or not has_plain_layers(model):
        return None
    is_bfloat16 = model.compute_dtype == torch.bfloat16
    if is_bfloat16 and (model.config.hidden_size % 2 or model.config.intermediate_size % 2):
        return None  # its numbers go into products in pairs
    layer: Any = model.layers[0]
    attention = layer.self_attn
    dim = attention.head_dim
    kv_heads = attention.k_proj.out_features // dim
    group = attention.q_proj.out_features // attention.k_proj.out_features
    kernel = compiled(dim, kv_heads, group, is_bfloat16)
    head_kernel = compiled(dim, kv_heads, group, False)  # logits are made in float32
    return None if kernel is None or head_kernel is None else FusedStep(model, kernel, head_kernel)


def _layers_of(model: CausalLM, dtype: torch.dtype, width: int) -> Iterator[_Layer]:
    backbone: Any = model.module.base_model
    layers = list(backbone.layers)
    for number, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        following = backbone.norm if number == len(layers) - 1 else layers[number + 1].input_layernorm
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        yield _Layer(
            qkv=packed([attention.q_proj, attention.k_proj, attention.v_proj], dtype, width=width),
            out=packed([attention.o_proj], dtype, width=width),
            gate_up=packed_in_turn([mlp.gate_proj, mlp.up_proj], dtype, width=width),
            down=packed([mlp.down_proj], dtype, width=width),
            query_norm=None if norms[0] is None else _vector(norms[0].weight),
            key_norm=None if norms[1] is None else _vector(norms[1].weight),
            eps=model.config.rms_norm_eps,
            scaling=attention.scaling,
            window=window_of(layer, model) or 0,
            next_norm=_vector(layer.post_attention_layernorm.weight),
            next_layer_norm=_vector(following.weight),
        )


def _vector(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()


def _at(vector: Tensor | None) -> int | None:
    return None if vector is None else vector.data_ptr()
