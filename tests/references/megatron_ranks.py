"""Engines of the Megatron kind for tests, in processes where references.megatron_cpu is in force."""

from __future__ import annotations

import dataclasses
from typing import Any

from strop.engines.config import EngineConfig, MegatronConfig, ModelConfig, OptimizerConfig
from strop.engines.megatron.engine import MegatronTrainEngine
from strop.engines.model import load_model
from strop.engines.parallel.process_group import Ranks as RankGroup


class PipelineRanks(RankGroup):
    mesh_sizes: Any = None
    @property
    def ranks_per_row(self): return self.mesh_sizes.tp*self.mesh_sizes.cp
    @property
    def dp_rank(self): return self.rank//self.ranks_per_row%self.mesh_sizes.dp
    @property
    def dp_size(self): return self.mesh_sizes.dp


def megatron_parallel(ranks: Any, mesh: Any) -> Any:
    if mesh.size==1: return ranks.join()
    base = ranks.join()
    got = PipelineRanks(**{f.name: getattr(base,f.name) for f in dataclasses.fields(base)})
    object.__setattr__(got,"mesh_sizes",mesh)
    return got


def megatron_engine(parallel: Any, folder: str, mesh: Any) -> MegatronTrainEngine:
    model = load_model(
        ModelConfig(path=folder, dtype=mesh.dtype, gradient_checkpointing=mesh.checkpointing), parallel=parallel
    )
    engine = EngineConfig(
        kind="megatron",
        max_tokens_per_device=mesh.max_tokens,
        tensor_parallel=mesh.tp,
        pipeline_parallel=mesh.pp,
        expert_parallel=mesh.ep,
        context_parallel=mesh.cp,
        megatron=MegatronConfig(
            virtual_pipeline_parallel=mesh.vpp, distributed_optimizer=mesh.distributed, **mesh.settings
        ),
    )
    optim = OptimizerConfig(lr=0.05, eps=1e-2, max_grad_norm=3.0)
    return MegatronTrainEngine(model, engine, optim, total_steps=None, parallel=parallel)
