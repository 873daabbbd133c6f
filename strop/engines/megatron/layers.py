"""Layers of a model of megatron-core that computes packed rows as the torch engine does.

A layer is megatron-core's own, from its local modules (no Transformer Engine, no apex), but for three parts: the norm,
which counts the tokens of sequence-parallel ranks, the attention between projections, which rotates queries and keys by
their positions and calls the packed attention of `strop.engines.attention` on the heads of this rank, and the router of
experts (routers.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from strop.engines.attention_form import AttentionContext, AttentionForm
from strop.engines.megatron.routers import Router
from strop.engines.moe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """A packed row of N tokens, as every layer sees it."""

    attention: AttentionContext
    cos: Tensor
    """[N, D], of the angles by which the positions rotate queries and keys."""
    sin: Tensor
    """[N, D]"""
    routing: Routing | None
    """Of this rank's tokens; None in a dense model."""


class ValueHead(nn.Module):
    """Weight [1, D] of a value head, whole on every tensor-parallel rank, each of which applies it to its share of the
    tokens; its gradient is added up over them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Stage(GPTModel):  # type: ignore[misc]
    """Some neighbouring layers of a model: embedding in front of the first, norm and head behind the last."""

    padding_token: int | None = None
    """Id whose embedding has no gradient where it is looked up, as in transformers."""

    def __init__(self, *args: Any, gives_values: bool, **kwargs: Any) -> None:
        """As GPTModel; the head of the last stage gives values in place of logits where `gives_values`."""
        super().__init__(*args, **kwargs)
        self.value_head: ValueHead | None = None
        if gives_values and self.post_process:
            self.output_layer: Any = None
            self.value_head = ValueHead(self.config)

    def forward(self, input_ids: Tensor, position_ids: Tensor, row: PackedRow) -> Tensor:
        """Hidden states [n, 1, D] behind these layers, of this rank's n tokens.

        Args:
            input_ids, position_ids: [1, N], read by the first stage; others have what `set_input_tensor` gave them.
            row: the tokens' attention.
        """
        hidden = self._embedded(input_ids, position_ids) if self.pre_process else None
        # The one argument that megatron-core hands on to layers and attention, recomputed ones included, unread.
        output: Tensor = self.decoder(hidden_states=hidden, attention_mask=None, attention_bias=row)
        return output

    def _embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embeddings [n, 1, D] of this rank's tokens."""
        hidden: Tensor = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if self.padding_token is None:
            return hidden
        ids = input_ids[0]
        if self.config.sequence_parallel:
            ids = ids.chunk(self.config.tensor_model_parallel_size)[self.pg_collection.tp.rank()]
        return torch.where((ids == self.padding_token)[:, None, None], hidden.detach(), hidden)


class Norm(nn.RMSNorm):
    """Root-mean-square norm over the tokens, or heads, of one rank; its gradient is added up over the ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Layer(TransformerLayer):  # type: ignore[misc]
    """A layer, whose router takes part in the routing of the packed row."""

    def forward(self, *args: Any, attention_bias: PackedRow, **kwargs: Any) -> Any:
        """As megatron-core's, of a packed row."""
        routing = attention_bias.routing
        with self.mlp.router.routed(routing) if self.is_moe_layer else contextlib.nullcontext():
            return super().forward(*args, attention_bias=attention_bias, **kwargs)


class CoreAttention(nn.Module):
    """Attention of the heads of this rank over the tokens of a packed row."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        windows: Sequence[int | None],
        by_formula: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        self._layer = layer_number - 1
        self._form = AttentionForm(
            scaling=config.kv_channels**-0.5, window=windows[self._layer], by_formula=by_formula
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        /,
        *,
        attention_bias: PackedRow,
        **_: Any,
    ) -> Tensor:
        """Output [N, 1, H * D] of query [N, 1, H, D], key and value [N, 1, Hkv, D]."""
        row = attention_bias
        cos, sin = row.cos[:, None], row.sin[:, None]
        output = row.attention.attend(
            self._layer,
            _rotated(query[:, 0], cos, sin),
            _rotated(key[:, 0], cos, sin),
            value[:, 0],
            self._form,
        )
        return output.flatten(1)[:, None]


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [N, H, D] rotated by angles [N, 1, D], whose halves are pairs, as transformers does it."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def layer_specs(
    config: TransformerConfig, *, layers: range, windows: Sequence[int | None], by_formula: bool
) -> TransformerBlockSubmodules:
    """Specification of some layers of a model.

    Args:
        config: of the model.
        layers: numbers of those that are asked for, from 0.
        windows: of each layer of the model, tokens that a token sees; None: all before it.
        by_formula: attention without a fused kernel.
    """
    experts = config.num_moe_experts
    if not hasattr(moe_utils, "te_general_gemm"):
        # Routers of megatron-core 0.16.1 ask for this name, which is set where Transformer Engine is installed alone.
        # To be removed when its test fails, which looks for the name in a process without it.
        moe_utils.te_general_gemm = None
    has_experts = [False] * config.num_layers if experts is None else list(config.moe_layer_freq)
    norm = Norm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=partial(CoreAttention, windows=windows, by_formula=by_formula),
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )

    def layer(number: int) -> ModuleSpec:
        mlp = get_mlp_module_spec(use_te=False, num_experts=experts if has_experts[number] else None)
        if has_experts[number]:
            mlp.submodules = dataclasses.replace(mlp.submodules, router=Router)
        return ModuleSpec(
            module=Layer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=Norm,
                self_attention=attention,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=Norm,
                mlp=mlp,
                mlp_bda=get_bias_dropout_add,
            ),
        )

    return TransformerBlockSubmodules(layer_specs=[layer(number) for number in layers], layer_norm=Norm)
