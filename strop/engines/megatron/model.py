"""A language model, or a value model, of megatron-core with the weights of a Hugging Face one, divided over ranks.

The families are those whose layers megatron-core has with the same arithmetic, and whose weights weight_map.py knows:
Llama, Mistral, Qwen 2, Qwen 3 and Qwen 3 MoE. Positions are rotated by the module of transformers, so every way of
scaling them is carried.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from strop.engines.attention import FORMULA_NAME
from strop.engines.attention_form import AttentionContext
from strop.engines.causal_lm import HALF, CausalLM
from strop.engines.config import EngineConfig
from strop.engines.head import Head
from strop.engines.megatron.checks import check_model, check_recomputed_fields
from strop.engines.megatron.layers import PackedRow, Stage, layer_specs
from strop.engines.megatron.routers import ExpertLayers, expert_layers
from strop.engines.megatron.stages import STAGE_FIELDS, stage_layout, stage_sizes
from strop.engines.megatron.weight_map import Mapped, check_complete, mapped_parameters
from strop.engines.moe.routing import Routing
from strop.engines.multimodal.vl_model import Vision
from strop.engines.parallel.ranks import Parallel
from strop.engines.parallel.vocabulary import VocabularyShard
from strop.engines.weights import weights_metadata


class MegatronModel:
    """This rank's part of a model: its stages, their parameters, and the head on its part of the vocabulary."""

    media: Vision | None = None
    """Text alone."""
    key_heads: slice | None = None
    """Each rank has the key heads of its queries."""

    def __init__(self, whole: CausalLM, engine: EngineConfig, parallel: Parallel) -> None:
        """Build the part of the model, without values.

        Args:
            whole: the model as transformers has it.
            engine: settings of the role, whose groups this process has joined.
            parallel: this rank.

        Raises:
            ValueError: a model that is not carried, or settings that megatron-core does not have.
        """
        text = whole.config.get_text_config()
        check_model(whole.config, engine)
        self._whole = whole
        self.device = parallel.device
        self.metadata = weights_metadata(whole.module)
        """Hugging Face names and shapes of all weights of the model."""
        self.config = _config(whole, engine, self.device)
        self.routers: ExpertLayers | None = expert_layers(self.config)
        self.stages = [self._stage(number) for number in range(engine.pipeline_chunks)]
        """In the order in which tokens pass them; one, where stages are not interleaved."""
        self.vocab_size = int(text.vocab_size)
        self.mapped: list[Mapped] = mapped_parameters(self.stages, self.config, self.vocab_size)
        self._check_map()
        self._rotary: Any = whole.module.model.rotary_emb.to(self.device)  # type: ignore[union-attr]
        self._banned: Tensor | None = None

    def _stage(self, number: int) -> Stage:
        config = self.config
        vp_stage = None if config.virtual_pipeline_model_parallel_size is None else number
        text = self._whole.config.get_text_config()
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * config.num_layers
        window = getattr(text, "sliding_window", None)
        if getattr(text, "layer_types", None) is None and window is not None:  # Mistral: every layer
            kinds = ["sliding_attention"] * config.num_layers
        windows = [window if kind == "sliding_attention" else None for kind in kinds]
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
        by_formula = text._attn_implementation == FORMULA_NAME
        specs = layer_specs(config, layers=layers, windows=windows, by_formula=by_formula)
        padded = (
            -(-int(text.vocab_size) // config.tensor_model_parallel_size) * config.tensor_model_parallel_size
        )
        gives_values = self._whole.is_value_model
        stage = Stage(
            config,
            specs,
            vocab_size=padded,
            max_sequence_length=int(text.max_position_embeddings),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=bool(text.tie_word_embeddings) and not gives_values,
            position_embedding_type="none",
            vp_stage=vp_stage,
            gives_values=gives_values,
        )
        _mark_cut_matrices(stage)
        stage.padding_token = self._whole.module.get_input_embeddings().padding_idx  # type: ignore[operator]
        return stage.to(self.device)  # type: ignore[no-any-return]

    @property
    def has_head(self) -> bool:
        """This rank has the last stage."""
        return self.stages[-1].post_process  # type: ignore[no-any-return]

    @property
    def head(self) -> Head:
        """The head on this rank's part of the vocabulary, or the value head; where other ranks have it, one for no
        tokens."""
        stage = self.stages[-1]
        if not self.has_head:
            nothing = torch.zeros(
                1, self.config.hidden_size, dtype=self.config.params_dtype, device=self.device
            )
            return Head(nothing.expand(1 if self._whole.is_value_model else self.vocab_size, -1))
        dtype = self._whole.compute_dtype
        product_dtype = dtype if dtype in HALF and self.device.type != "cpu" else None
        if stage.value_head is not None:
            return Head(stage.value_head.weight, product_dtype=product_dtype)
        is_shared = stage.share_embeddings_and_output_weights
        weight = stage.shared_embedding_or_output_weight() if is_shared else stage.output_layer.weight
        vocabulary = None
        if self.config.tensor_model_parallel_size > 1:
            rows = weight.shape[0]
            first = min(parallel_state.get_tensor_model_parallel_rank() * rows, self.vocab_size)
            size = min(rows, self.vocab_size - first)
            weight = weight[:size]  # behind it are rows of no token
            vocabulary = VocabularyShard(
                first=first, size=size, group=parallel_state.get_tensor_model_parallel_group()
            )
        return Head(weight, None, self._banned_ids, product_dtype=product_dtype, vocabulary=vocabulary)

    def backbone(self, *args: Any, **kwargs: Any) -> Tensor:
        """Hidden states come from the passes of all stages (passes.py)."""
        raise AssertionError("tokens are asked on the last stage, when their hidden states are there")

    def row(self, position_ids: Tensor, attention: AttentionContext, routing: Routing | None) -> PackedRow:
        """A packed row with positions [1, N], as the layers take it."""
        cos, sin = self._rotary(
            torch.empty(0, dtype=self.config.params_dtype, device=self.device), position_ids
        )
        return PackedRow(attention=attention, cos=cos[0], sin=sin[0], routing=routing)

    @property
    def _banned_ids(self) -> Tensor | None:
        ids = self._whole.never_sampled
        if ids and (self._banned is None or self._banned.tolist() != list(ids)):
            self._banned = torch.tensor(ids, device=self.device)
        return self._banned if ids else None

    def _check_map(self) -> None:
        """Every number of every weight has one place among all ranks."""
        shapes = {weight.name: weight.shape for weight in self.metadata}
        counts = check_complete(self.mapped, shapes)
        copies = dist.get_world_size() // (
            self.config.tensor_model_parallel_size * self.config.pipeline_model_parallel_size
        )
        expert_copies = (
            copies * self.config.tensor_model_parallel_size // self.config.expert_model_parallel_size
        )
        totals = torch.tensor(list(counts.values()), device=self.device)
        dist.all_reduce(totals)
        for weight, total in zip(self.metadata, totals.tolist(), strict=True):
            times = expert_copies if ".experts." in weight.name else copies
            if total != times * torch.Size(weight.shape).numel():
                raise ValueError(
                    f"the layers of megatron-core hold {total // times} of the {torch.Size(weight.shape).numel()} "
                    f"numbers of {weight.name} of this {type(self._whole.module).__name__}: use engine.kind=torch for "
                    f"this role"
                )


def _mark_cut_matrices(stage: Stage) -> None:
    """Say of each matrix that other ranks have other parts of it, as megatron-core does when it draws values."""
    for part in stage.modules():
        dim = 1 if isinstance(part, RowParallelLinear) else 0
        is_cut = isinstance(part, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding))
        if is_cut and part.weight is not None:
            set_tensor_model_parallel_attributes(part.weight, True, dim, 1)


def _config(whole: CausalLM, engine: EngineConfig, device: torch.device) -> TransformerConfig:
    """The model's shape and the parallel axes in the words of megatron-core."""
    settings = _model_settings(whole) | _axis_settings(engine, device)
    if whole.is_recomputed:
        check_recomputed_fields(engine)
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    # Kernels of apex and Transformer Engine, which are not needed here.
    fused = ("gradient_accumulation", "masked_softmax", "bias_activation", "bias_dropout", "apply_rope")
    may_change = {**{f"{name}_fusion": False for name in fused}, "persist_layer_norm": False}
    if sizes := stage_sizes(engine, settings["num_layers"]):
        settings["pipeline_model_parallel_layout"] = stage_layout(sizes)
    fields = engine.megatron.transformer_config
    overrides = {name: value for name, value in fields.items() if name not in STAGE_FIELDS}
    assert not set(overrides) & set(settings), "check_settings refuses them"
    try:
        return TransformerConfig(**settings, **{**may_change, **overrides})
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"megatron-core refuses the settings of this model and role ({error}): change its parallel sizes or "
            f"engine.megatron.transformer_config, or use engine.kind=torch"
        ) from error


def _model_settings(whole: CausalLM) -> dict[str, Any]:
    """Of the model's shape and dtypes."""
    text = whole.config.get_text_config()
    names = {
        weight.name.rpartition("layers.")[2].partition(".")[2] for weight in weights_metadata(whole.module)
    }
    is_half = whole.compute_dtype in HALF
    dtype = whole.compute_dtype if is_half else whole.head_weight.dtype
    heads = int(text.num_attention_heads)
    return {
        "num_layers": int(text.num_hidden_layers),
        "hidden_size": int(text.hidden_size),
        "num_attention_heads": heads,
        "num_query_groups": int(text.num_key_value_heads),
        "kv_channels": int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        "ffn_hidden_size": int(text.intermediate_size),
        "layernorm_epsilon": float(text.rms_norm_eps),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": "self_attn.q_proj.bias" in names,
        "qk_layernorm": "self_attn.q_norm.weight" in names,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": is_half,
        **_expert_settings(text),
    }


def _axis_settings(engine: EngineConfig, device: torch.device) -> dict[str, Any]:
    """Of the parallel axes, and of how ranks exchange what they compute."""
    chunks = engine.pipeline_chunks
    return {
        "calculate_per_token_loss": True,  # losses are sums: nothing is divided by ranks or micro-batches
        "tensor_model_parallel_size": engine.tensor_parallel,
        "sequence_parallel": engine.tensor_parallel > 1,
        "pipeline_model_parallel_size": engine.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "context_parallel_size": engine.context_parallel,
        "expert_model_parallel_size": engine.expert_parallel,
        "expert_tensor_parallel_size": 1,
        "variable_seq_lengths": chunks == 1,  # see passes.py
        "moe_token_dispatcher_type": "alltoall",  # also without experts: no other has rows of any length
        "batch_p2p_comm": device.type != "cpu" and chunks == 1,
        "perform_initialization": False,  # every value is loaded
        "use_cpu_initialization": device.type == "cpu",
    }


def _expert_settings(text: Any) -> dict[str, Any]:
    """Of layers with experts; nothing without any."""
    if not getattr(text, "num_experts", 0):
        return {}
    dense = set(getattr(text, "mlp_only_layers", None) or ())
    step = int(getattr(text, "decoder_sparse_step", 1))
    layers = range(int(text.num_hidden_layers))
    return {
        "num_moe_experts": int(text.num_experts),
        "moe_ffn_hidden_size": int(text.moe_intermediate_size),
        "moe_router_topk": int(text.num_experts_per_tok),
        "moe_router_pre_softmax": not text.norm_topk_prob,
        "moe_layer_freq": [int(number not in dense and (number + 1) % step == 0) for number in layers],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }
