"""Numbers of ranks that the engine of a role cannot have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, MoEConfig, OptimizerConfig
from strop.engines.parallel.axes import check_axes

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check(config: Config) -> None:
    """Refuse ranks that the engine of a role does not divide, and what does not go with how it divides its model.

    Raises:
        ValueError: as `check_axes`, `check_tensor_parallel_settings` and `check_expert_parallel_settings`.
    """
    optims = {"actor": config.actor.optim, "critic": config.critic.optim, "prm": config.prm.optim}
    loras = {"critic": ("critic.lora.rank", config.critic.lora)}
    for role, engine in config.engines.items():
        num_ranks = config.resources.apart.get(role, config.resources.ranks)
        check_axes(engine, num_ranks, section=f"{role}.engine")
        if role == "actor":
            check_router_settings(role, engine, config.actor.moe)
        if role in config.used_engines:
            lora = loras.get(role, ("model.lora.rank", config.model.lora))
            check_tensor_parallel_settings(role, engine, optims.get(role), config.model, lora=lora)
            check_expert_parallel_settings(role, engine, optims.get(role), lora=lora)


def check_tensor_parallel_settings(
    role: str,
    engine: EngineConfig,
    optim: OptimizerConfig | None,
    model: ModelConfig,
    *,
    lora: tuple[str, LoraConfig],
) -> None:
    """Raise a ValueError for settings that matrices over several ranks do not go with.

    Args:
        role: section of the engine.
        engine, optim, model: of the role; no optimizer where it is not trained.
        lora: full key of the rank of its adapters, and their settings.
    """
    if engine.tensor_parallel == 1:
        return
    optimizer = "adamw" if optim is None else optim.name
    others = {
        lora[0]: (lora[1].rank, 0),
        "model.use_liger": (model.use_liger, False),
        f"{role}.engine.compile": (engine.compile, False),
        f"{role}.engine.offload": (engine.offload, "none"),
        f"{role}.engine.offload_activations": (engine.offload_activations, False),
        f"{role}.optim.name": (optimizer, "adamw"),
    }
    for key, (value, needed) in others.items():
        if value != needed:
            raise ValueError(
                f"{role}.engine.tensor_parallel is {engine.tensor_parallel}, which does not go with {key}={value}: set "
                f"that to {needed}, or {role}.engine.tensor_parallel to 1"
            )


def check_expert_parallel_settings(
    role: str, engine: EngineConfig, optim: OptimizerConfig | None, *, lora: tuple[str, LoraConfig]
) -> None:
    """Raise a ValueError for settings that experts over several ranks do not go with; arguments as of
    `check_tensor_parallel_settings`."""
    if engine.expert_parallel == 1:
        return
    section = lora[0].removesuffix(".rank")
    of_experts = [target for target in lora[1].target_modules if "expert" in target]
    refused = {
        f"{role}.engine.compile=True": engine.compile and "false",
        f"{role}.optim.name=adamw_8bit": optim is not None and optim.name == "adamw_8bit" and "adamw or muon",
        f"{section}.target_modules=[{', '.join(of_experts)}]": lora[1].enabled
        and bool(of_experts)
        and "layers other than experts",
        f"{section}.path={lora[1].path}": bool(lora[1].path) and "an adapter that starts at zero",
    }
    for setting, instead in refused.items():
        if instead:
            raise ValueError(
                f"{role}.engine.expert_parallel is {engine.expert_parallel}, which does not go with {setting}: use "
                f"{instead}, or {role}.engine.expert_parallel=1"
            )


def check_router_settings(role: str, engine: EngineConfig, moe: MoEConfig) -> None:
    """Raise a ValueError for losses of routers that the engine of a role cannot add."""
    key = "balance_loss_coef" if moe.balance_loss_coef else "z_loss_coef"
    for setting, value, needed in (
        ("compile", engine.compile, False),
        ("pipeline_parallel", engine.pipeline_parallel, 1),
    ):
        if moe.is_on and value != needed:
            raise ValueError(
                f"{role}.moe.{key} is {getattr(moe, key)}, which does not go with {role}.engine.{setting}={value}: set "
                f"that to {needed}, or {role}.moe.{key} to 0"
            )


def check_shares_no_images(role: str, engine: EngineConfig, subject: str) -> None:
    """Raise a ValueError where ranks share each sequence, which has images; `subject` says whose they are."""
    for key in ("sequence_parallel", "tensor_parallel"):
        if (size := getattr(engine, key)) > 1:
            raise ValueError(
                f"{role}.engine.{key} is {size}, but {subject} have images, and it divides sequences over ranks, which "
                f"images cannot be: use {role}.engine.{key}=1"
            )
