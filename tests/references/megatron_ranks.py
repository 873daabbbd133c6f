"""Engines of the Megatron kind for tests, in processes where references.megatron_cpu is in force."""

from __future__ import annotations

from typing import Any

from references.rank_processes import leave
from strop.engines.config import EngineConfig, MegatronConfig, ModelConfig, OptimizerConfig
from strop.engines.megatron.engine import MegatronTrainEngine
from strop.engines.model import load_model
from strop.engines.value_models import load_value_model


def megatron_engine(ranks: Any, folder: str, mesh: Any, *, values: bool = False) -> MegatronTrainEngine:
    """The engine of this rank, with its group; of a value model where `values`."""
    axes = {
        "tensor_parallel": mesh.tp,
        "pipeline_parallel": mesh.pp,
        "pipeline_chunks": mesh.chunks,
        "expert_parallel": mesh.ep,
        "context_parallel": mesh.cp,
    }
    engine = EngineConfig(
        kind="megatron",
        max_tokens_per_device=mesh.max_tokens,
        pipeline_layers=mesh.layers,
        megatron=MegatronConfig(distributed_optimizer=mesh.distributed, transformer_config=dict(mesh.fields)),
        **axes,
    )
    leave()  # megatron-core's groups have the sizes of one call, and go with its group
    parallel = ranks.join(**axes)
    model = (load_value_model if values else load_model)(
        ModelConfig(path=folder, dtype=mesh.dtype, gradient_checkpointing=mesh.checkpointing),
        parallel=parallel,
    )
    optim = OptimizerConfig(lr=0.05, eps=1e-2, max_grad_norm=3.0)
    return MegatronTrainEngine(model, engine, optim, total_steps=None, parallel=parallel)
