"""Models and settings that the Megatron engine does not have, refused before anything is loaded.

megatron-core itself is not imported here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.megatron.core_fields import transformer_fields
from strop.engines.megatron.stages import check_stage_fields, stage_sizes
from strop.utils.field_types import nearest
from strop.utils.setting_text import setting_text

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose layers and weights are known."""
DEVICES = ("cuda",)
"""Kinds of devices that its layers run on: megatron-core asks for CUDA wherever it makes or moves a tensor."""
_SET_ELSEWHERE = {
    "moe_z_loss_coeff": "routers have actor.moe and sft.moe (z_loss_coef), which no micro-batch changes",
    "moe_aux_loss_coeff": "routers have actor.moe and sft.moe (balance_loss_coef), which no micro-batch changes",
    "moe_enable_routing_replay": "experts are given with the rows, where router replay is on",
    "moe_router_fusion": "routers here say what they choose, which the fused one does not",
    "moe_layer_recompute": "a router that is computed again on its own does not know the routing of its pass",
    "moe_expert_capacity_factor": "experts here take every token that chose them",
    "pipeline_model_parallel_layout": "pipeline_layers of the engine says how many layers each stage has",
}
"""Fields of TransformerConfig that are refused, with the reason or what to do instead."""
SET_BY_MODEL = frozenset((
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
    *("layernorm_epsilon", "normalization", "gated_linear_unit", "activation_func", "add_bias_linear"),
    *("add_qkv_bias", "qk_layernorm", "hidden_dropout", "attention_dropout", "params_dtype", "pipeline_dtype", "bf16"),
    *("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_layer_freq"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_grouped_gemm"),
))  # fmt: skip
"""Fields of TransformerConfig whose values are those of the model's folder and precision, or of its layers here."""
SET_BY_ENGINE = frozenset((
    *("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "context_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("calculate_per_token_loss", "variable_seq_lengths", "moe_token_dispatcher_type", "batch_p2p_comm"),
    *("perform_initialization", "use_cpu_initialization"),
))  # fmt: skip
"""Fields of TransformerConfig that follow from the other settings of the engine."""
RECOMPUTED = ("recompute_granularity", "recompute_method", "recompute_num_layers")
"""Fields of TransformerConfig that model.gradient_checkpointing=true sets."""


def check_installed(section: str = "engine") -> None:
    """Raise a ValueError where megatron-core is not installed; `section` is what the sentence calls the settings."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ValueError(
            f"{section}.kind is megatron, which needs the package megatron-core: pip install 'strop[megatron]', or use "
            f"{section}.kind=torch"
        )


def check_device(device: str, *, section: str = "engine") -> None:
    """Raise a ValueError where megatron-core does not run on this device.

    Args:
        device: torch's name of it, such as cpu.
        section: what the sentence calls the settings, such as actor.engine.
    """
    if device.partition(":")[0] not in DEVICES:
        raise ValueError(
            f"{section}.kind is megatron, which computes on CUDA devices alone, and the device here is {device}: use "
            f"{section}.kind=torch, or resources.device=cuda on a machine that has one"
        )


def check_settings(
    engine: EngineConfig, optim: OptimizerConfig | None = None, *, section: str = "engine"
) -> None:
    """Refuse settings of the torch engine that megatron-core has nothing for.

    Args:
        engine: settings of the role.
        optim: of its optimizer; None where it is not trained.
        section: what the sentence calls the settings, such as actor.engine.

    Raises:
        ValueError: the sentence says which.
    """
    if engine.kind != "megatron":
        return
    role = section.removesuffix("engine")
    for key, value, needed in (
        (f"{section}.sequence_parallel", engine.sequence_parallel, 1),
        (f"{section}.shard_size", engine.shard_size, 0),
        (f"{section}.reshard_after_forward", engine.reshard_after_forward, True),
        (f"{section}.gradient_sync", engine.gradient_sync, "last"),
        (f"{section}.offload_activations", engine.offload_activations, False),
        (f"{section}.compile", engine.compile, False),
        (f"{section}.pipeline_schedule", engine.pipeline_schedule, "1f1b"),
        (f"{role}optim.name", "adamw" if optim is None else optim.name, "adamw"),
    ):
        if value != needed:
            raise ValueError(
                f"{key} is {setting_text(value)}, which {section}.kind=megatron does not have: set it to "
                f"{setting_text(needed)}, or use {section}.kind=torch"
            )
    if engine.offload == "all":
        raise ValueError(
            f"{section}.offload is all, which {section}.kind=megatron does not have: use none or optimizer"
        )
    _check_fields(engine.megatron.transformer_config, section)
    check_stage_fields(engine, section=section)
    if engine.pipeline_chunks > 1 and engine.context_parallel > 1:
        raise ValueError(
            f"{section}.pipeline_chunks is {engine.pipeline_chunks} and {section}.context_parallel is "
            f"{engine.context_parallel}, which {section}.kind=megatron does not have together: set one to 1"
        )


def _check_fields(fields: Mapping[str, Any], section: str) -> None:
    """Refuse fields that TransformerConfig does not have, or that the engine has settings of its own for."""
    key = f"{section}.megatron.transformer_config"
    known = transformer_fields()
    for name in fields if known else ():
        if name not in known:
            near = nearest(name, sorted(known))
            suggestion = f"; did you mean {near}?" if near else ""
            raise ValueError(
                f"{key} sets {name}, which is no field of TransformerConfig of the installed megatron-core{suggestion}"
            )
    for name, instead in _SET_ELSEWHERE.items():
        if fields.get(name):
            raise ValueError(f"{key} sets {name} to {setting_text(fields[name])}, but {instead}: remove it")
    for names, origin in (
        (SET_BY_MODEL, "follows from the model"),
        (SET_BY_ENGINE, "follows from the other settings of the engine"),
    ):
        if taken := sorted(names & fields.keys()):
            raise ValueError(f"{key} sets {taken[0]}, which {origin}: remove it")
    if "moe" in (fields.get("recompute_modules") or ()):
        raise ValueError(
            f"{key} has recompute_modules={list(fields['recompute_modules'])}, but a router that is computed again on "
            f"its own does not know the routing of its pass: remove moe, or use model.gradient_checkpointing=true"
        )


def check_recomputed_fields(engine: EngineConfig, *, section: str = "engine") -> None:
    """Refuse fields of TransformerConfig that model.gradient_checkpointing=true sets.

    Args:
        engine: settings of the role, whose layers are computed again in the backward pass.
        section: what the sentence calls them, such as critic.engine.

    Raises:
        ValueError: the sentence names the field.
    """
    for name in RECOMPUTED:
        if name in engine.megatron.transformer_config:
            raise ValueError(
                f"{section}.megatron.transformer_config sets {name}, which follows from "
                f"model.gradient_checkpointing=true: remove it, or set that to false"
            )


def check_model(config: Any, engine: EngineConfig, *, section: str = "engine") -> None:
    """Refuse a model whose layers are not carried, or do not divide over the ranks.

    Args:
        config: the model's configuration as transformers reads it.
        engine: settings of the role.
        section: what the sentence calls them, such as critic.engine.

    Raises:
        ValueError: another family, biases or activations that are not carried, or sizes that do not divide.
    """
    text = config.get_text_config()
    if text is not config or text.model_type not in FAMILIES:
        raise ValueError(
            f"{section}.kind is megatron, which carries the model types {', '.join(FAMILIES)}, and the model is of "
            f"{config.model_type}: use {section}.kind=torch"
        )
    is_biased = text.model_type == "llama" and (text.attention_bias or text.mlp_bias)
    is_biased |= text.model_type.startswith("qwen3") and text.attention_bias
    for name, is_other in (
        ("biases of its projections", is_biased),
        (f"the activation {text.hidden_act}", text.hidden_act not in ("silu", "swish")),
        ("partly rotated heads", float(getattr(text, "partial_rotary_factor", None) or 1.0) != 1.0),
    ):
        if is_other:
            raise ValueError(
                f"{section}.kind is megatron, and the model has {name}, which its layers here do not: use "
                f"{section}.kind=torch"
            )
    _check_sizes(text, engine, section)


def _check_sizes(text: Any, engine: EngineConfig, section: str) -> None:
    experts = int(getattr(text, "num_experts", 0) or 0)
    tp, ep = engine.tensor_parallel, engine.expert_parallel
    if experts and tp > 1 and ep < tp:
        raise ValueError(
            f"{section}.tensor_parallel is {tp}, whose ranks share the tokens of experts, so that megatron-core wants "
            f"the experts over at least as many: set {section}.expert_parallel to {tp} or a multiple"
        )
    num_layers = int(text.num_hidden_layers)
    stages, num_stages = f"{section}.pipeline_parallel", engine.pipeline_parallel * engine.pipeline_chunks
    if engine.pipeline_chunks > 1:
        stages += f" times {section}.pipeline_chunks"
    if stage_sizes(engine, num_layers, section=section):
        num_stages = 1  # which may differ, and were compared with the model
    for key, size, what, count in (
        (f"{section}.tensor_parallel", tp, "attention heads", int(text.num_attention_heads)),
        (f"{section}.tensor_parallel", tp, "key-value heads", int(text.num_key_value_heads)),
        (f"{section}.tensor_parallel", tp, "hidden units", int(text.intermediate_size)),
        (stages, num_stages, "layers", num_layers),
        (f"{section}.expert_parallel", ep, "experts", experts),
    ):
        if size > 1 and count % size:
            raise ValueError(
                f"{key} is {size}, but the {count} {what} of the model do not divide over so many with "
                f"{section}.kind=megatron: use a divisor of {count}"
            )
        if size > 1 and not count:
            raise ValueError(f"{key} is {size}, but the model has no {what}: set it to 1")
