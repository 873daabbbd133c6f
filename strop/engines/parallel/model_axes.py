"""The axes of a role's ranks, compared with its model."""

from __future__ import annotations

from typing import Any

from torch import nn

from strop.engines.config import EngineConfig
from strop.engines.megatron.checks import check_model
from strop.engines.parallel.context import check_context_parallel
from strop.engines.parallel.experts import check_adapted_experts, check_expert_parallel
from strop.engines.parallel.stages import check_pipeline_parallel
from strop.engines.parallel.tensor import check_tensor_parallel
from strop.engines.parallel.ulysses import check_sequence_parallel


def divides_model(engine: EngineConfig) -> bool:
    """An axis beside data parallelism has several ranks, or the engine has layers of its own for the model."""
    sizes = (
        engine.sequence_parallel,
        engine.context_parallel,
        engine.tensor_parallel,
        engine.pipeline_parallel,
        engine.expert_parallel,
    )
    return max(sizes) > 1 or engine.kind == "megatron"


def check_model_axes(
    config: Any,
    engine: EngineConfig,
    num_ranks: int,
    *,
    section: str = "engine",
    module: nn.Module | None = None,
) -> None:
    """Refuse a model that cannot be divided as the engine is told to.

    Args:
        config: the model's configuration as transformers reads it.
        engine: says how.
        num_ranks: of the role.
        section: what the sentence calls the settings, such as critic.engine.
        module: the model, if it is there.

    Raises:
        ValueError: heads, hidden units, layers or experts do not divide, or the model or its adapter has a part that an
            axis does not carry.
    """
    if engine.kind == "megatron":
        check_model(config, engine, section=section)
        return
    check_sequence_parallel(config, engine.sequence_parallel, num_ranks, section=section)
    check_context_parallel(config, engine.context_parallel, section=section)
    check_tensor_parallel(config, engine.tensor_parallel, section=section)
    check_pipeline_parallel(config, engine, section=section)
    check_expert_parallel(config, engine.expert_parallel, section=section, module=module)
    if module is not None:
        check_adapted_experts(module, engine, section=section)
