"""Numbers of ranks that the engine of a role cannot have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, MoEConfig, OptimizerConfig
from strop.engines.megatron.checks import check_installed, check_recomputed_fields, check_settings
from strop.engines.parallel.axes import check_axes, without_adapted_experts
from strop.utils.setting_text import setting_text

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check(config: Config) -> None:
    """Refuse ranks that the engine of a role does not divide, and what does not go with how it divides its model.

    Raises:
        ValueError: as `check_axes` and `check_parallel_settings`.
    """
    optims = {"actor": config.actor.optim, "critic": config.critic.optim, "prm": config.prm.optim}
    loras = {"critic": ("critic.lora.rank", config.critic.lora)}
    for role, engine in config.engines.items():
        num_ranks = config.resources.ranks_of(role)
        check_axes(engine, num_ranks, section=f"{role}.engine")
        if role == "actor":
            check_router_settings(role, engine, config.actor.moe)
        if role in config.used_engines:
            model = config.reward_model.model if role == "reward_model" else config.model
            lora = loras.get(role, ("model.lora.rank", model.lora))
            check_parallel_settings(role, engine, optims.get(role), model, lora=lora)
    used = config.used_engines.items()
    _check_same_axes({role: engine for role, engine in used if role not in config.resources.apart})


def check_parallel_settings(
    role: str,
    engine: EngineConfig,
    optim: OptimizerConfig | None,
    model: ModelConfig,
    *,
    lora: tuple[str, LoraConfig],
) -> None:
    """Raise a ValueError for settings that matrices, layers or experts over several ranks do not go with.

    Args:
        role: section of the engine.
        engine, optim, model: of the role; no optimizer where it is not trained.
        lora: full key of the rank of its adapters, and their settings.
    """
    if engine.kind == "megatron":
        _check_megatron_settings(role, engine, optim, model, lora=lora)
        return
    is_8bit = optim is not None and optim.name == "adamw_8bit"
    others = {
        f"{role}.engine.offload_activations": (engine.offload_activations, False),
        f"{role}.optim.name": ("adamw_8bit" if is_8bit else "adamw", "adamw"),
    }
    _check_expert_parallel_settings(role, engine, optim)
    _check_adapted_experts(role, engine, lora=lora)
    fused = {"model.use_liger": (model.use_liger, False)}
    compiled = {f"{role}.engine.compile": (engine.compile, False)}
    if engine.compile and engine.pipeline_schedule == "zero_bubble":
        raise ValueError(
            f"{role}.engine.pipeline_schedule is zero_bubble, which does not go with {role}.engine.compile=true: use "
            f"1f1b, or {role}.engine.compile=false"
        )
    for key, size, refused in (
        ("tensor_parallel", engine.tensor_parallel, others | fused | compiled),
        ("pipeline_parallel", engine.pipeline_parallel, others),
    ):
        for other, (value, needed) in refused.items():
            if size > 1 and value != needed:
                raise ValueError(
                    f"{role}.engine.{key} is {size}, which does not go with {other}={setting_text(value)}: set that to "
                    f"{setting_text(needed)}, or {role}.engine.{key} to 1"
                )


def _check_megatron_settings(
    role: str,
    engine: EngineConfig,
    optim: OptimizerConfig | None,
    model: ModelConfig,
    *,
    lora: tuple[str, LoraConfig],
) -> None:
    """Raise a ValueError for settings that the Megatron engine does not have; arguments as of
    `check_parallel_settings`."""
    check_installed(f"{role}.engine")
    check_settings(engine, optim, section=f"{role}.engine")
    if model.gradient_checkpointing and optim is not None:
        check_recomputed_fields(engine, section=f"{role}.engine")
    for key, value, needed in (
        (lora[0], lora[1].rank, 0),
        ("model.use_liger", model.use_liger, False),
        ("model.freeze_vision_tower", model.freeze_vision_tower, False),
    ):
        if value != needed:
            raise ValueError(
                f"{key} is {setting_text(value)}, which {role}.engine.kind=megatron does not have: set it to "
                f"{setting_text(needed)}, or use {role}.engine.kind=torch"
            )
    dtype = "reward_model.dtype" if role == "reward_model" else "model.dtype"
    if model.dtype == "float16":
        raise ValueError(
            f"{dtype} is float16, which {role}.engine.kind=megatron does not have: use bfloat16 or float32"
        )
    if model.dtype == "float64" and optim is not None and engine.megatron.distributed_optimizer:
        raise ValueError(
            f"model.dtype is float64, which the distributed optimizer of megatron-core does not have: set "
            f"{role}.engine.megatron.distributed_optimizer=false"
        )


def _check_same_axes(engines: Mapping[str, EngineConfig]) -> None:
    """Refuse roles of one process that divide their models with megatron-core in two ways: it has one set of groups.

    Args:
        engines: of the roles, by their names.

    Raises:
        ValueError: the sentence names two of them.
    """
    first: tuple[str, EngineConfig] | None = None
    for role, engine in engines.items():
        if engine.kind != "megatron":
            continue
        first = first or (role, engine)
        for key, size, other in (
            ("tensor_parallel", engine.tensor_parallel, first[1].tensor_parallel),
            ("pipeline_parallel", engine.pipeline_parallel, first[1].pipeline_parallel),
            ("pipeline_chunks", engine.pipeline_chunks, first[1].pipeline_chunks),
            ("context_parallel", engine.context_parallel, first[1].context_parallel),
            ("expert_parallel", engine.expert_parallel, first[1].expert_parallel),
        ):
            if size != other:
                raise ValueError(
                    f"{role}.engine.{key} is {size} and {first[0]}.engine.{key} is {other}, but megatron-core divides "
                    f"all models of a process alike: make them equal, place one of the roles apart (resources.apart), "
                    f"or use {role}.engine.kind=torch"
                )


def _check_expert_parallel_settings(role: str, engine: EngineConfig, optim: OptimizerConfig | None) -> None:
    """Raise a ValueError for settings that experts over several ranks do not go with; arguments as of
    `check_parallel_settings`."""
    if engine.expert_parallel == 1:
        return
    refused = {
        f"{role}.engine.compile=true": engine.compile and "false",
        f"{role}.optim.name=adamw_8bit": optim is not None and optim.name == "adamw_8bit" and "adamw or muon",
    }
    for setting, instead in refused.items():
        if instead:
            raise ValueError(
                f"{role}.engine.expert_parallel is {engine.expert_parallel}, which does not go with {setting}: use "
                f"{instead}, or {role}.engine.expert_parallel=1"
            )


def _check_adapted_experts(role: str, engine: EngineConfig, *, lora: tuple[str, LoraConfig]) -> None:
    """Raise a ValueError for adapters of experts that are divided, or sharded apart from their layers; arguments as of
    `check_parallel_settings`. Those of a folder are known once it is read (`strop.engines.parallel.experts`)."""
    of_experts = [target for target in lora[1].target_modules if "expert" in target]
    for key, (value, needed) in without_adapted_experts(engine).items():
        if value != needed and lora[1].enabled and of_experts:
            key_of_targets = f"{lora[0].removesuffix('.rank')}.target_modules"
            raise ValueError(
                f"{role}.engine.{key} is {value}, which does not go with {key_of_targets}=[{', '.join(of_experts)}]: "
                f"use layers other than experts, or {role}.engine.{key}={needed}"
            )


def check_router_settings(role: str, engine: EngineConfig, moe: MoEConfig) -> None:
    """Raise a ValueError for losses of routers that the engine of a role cannot add."""
    key = "balance_loss_coef" if moe.balance_loss_coef else "z_loss_coef"
    if moe.is_on and engine.compile:
        raise ValueError(
            f"{role}.moe.{key} is {getattr(moe, key)}, which does not go with {role}.engine.compile=true: set that to "
            f"false, or {role}.moe.{key} to 0"
        )


def check_shares_no_images(role: str, engine: EngineConfig, subject: str) -> None:
    """Raise a ValueError where ranks share each sequence, which has images; `subject` says whose they are."""
    sizes = {
        "context_parallel": engine.context_parallel,
        "sequence_parallel": engine.sequence_parallel,
        "tensor_parallel": engine.tensor_parallel,
        "pipeline_parallel": engine.pipeline_parallel,
    }
    for key, size in sizes.items():
        if size > 1:
            raise ValueError(
                f"{role}.engine.{key} is {size}, but {subject} have images, which cannot be divided over ranks as it "
                f"divides text: use {role}.engine.{key}=1"
            )
