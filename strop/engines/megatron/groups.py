"""Process groups of megatron-core over the ranks of a role.

megatron-core keeps its groups in the process (`megatron.core.parallel_state`), one plan for all models in it, so roles
in one process that use it have the same plan. Ranks count with tp fastest, then cp, dp and pp slowest, as those of
`strop.controller.mesh.Mesh` do; expert parallelism takes neighbouring ranks of dp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from strop.engines.config import EngineConfig
from strop.engines.parallel.ranks import Parallel
from strop.utils.device import collective_backend

_ORDER = "tp-cp-ep-dp-pp"
_SEED = 1
"""Of generators that nothing draws from: every dropout is 0."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of the parallel axes of a model."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Parts of the model that each pipeline stage has."""
    context: int = 1
    expert: int = 1


class _Joined:
    """The plan that this process's groups were made for, and the group of all ranks that they belong to."""

    plan: Plan | None = None
    world: object = None


def join_groups(config: EngineConfig, parallel: Parallel) -> Plan:
    """Make the groups of a role's plan, or use those of an earlier role in this process; a collective.

    Raises:
        ValueError: a role of another plan has made them.
    """
    plan = plan_of(config)
    if not dist.is_initialized():  # a process on its own, which has no group
        backend = collective_backend(parallel.device.type)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized() and _Joined.world is not dist.group.WORLD:
        parallel_state.destroy_model_parallel()  # of ranks that have been left
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=plan.tensor,
            pipeline_model_parallel_size=plan.pipeline,
            virtual_pipeline_model_parallel_size=plan.virtual_pipeline if plan.virtual_pipeline > 1 else None,
            context_parallel_size=plan.context,
            expert_model_parallel_size=plan.expert,
            expert_tensor_parallel_size=1,  # an expert is whole on its rank
            order=_ORDER,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(_SEED)
        _Joined.plan, _Joined.world = plan, dist.group.WORLD
    if _Joined.plan != plan:
        raise ValueError(
            f"a role of this process divides its model with megatron-core as {_Joined.plan}, and another as {plan}: "
            f"give the roles of one process the same engine.tensor_parallel, pipeline_parallel, context_parallel, "
            f"expert_parallel and engine.megatron, or place them apart (resources.apart)"
        )
    return plan


def plan_of(config: EngineConfig) -> Plan:
    """Sizes of the axes as the settings have them."""
    return Plan(
        tensor=config.tensor_parallel,
        pipeline=config.pipeline_parallel,
        virtual_pipeline=config.megatron.virtual_pipeline_parallel,
        context=config.context_parallel,
        expert=config.expert_parallel,
    )
