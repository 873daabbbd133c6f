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
class _Sizes:
    """Of the axes that a process's groups were made for."""

    tensor_parallel: int
    pipeline_parallel: int
    pipeline_chunks: int
    context_parallel: int
    expert_parallel: int


class _Joined:
    """Sizes of this process's groups, and the group of all ranks that they belong to."""

    sizes: _Sizes | None = None
    world: object = None


def join_groups(config: EngineConfig, parallel: Parallel) -> None:
    """Make the groups of a role's axes, or use those of an earlier role in this process; a collective.

    Raises:
        ValueError: a role with other axes has made them.
    """
    sizes = _Sizes(
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        pipeline_chunks=config.pipeline_chunks,
        context_parallel=config.context_parallel,
        expert_parallel=config.expert_parallel,
    )
    if not dist.is_initialized():  # a process on its own, which has no group
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(collective_backend(parallel.device.type), store=store, rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized() and _Joined.world is not dist.group.WORLD:
        parallel_state.destroy_model_parallel()  # of ranks that have been left
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor_parallel,
            pipeline_model_parallel_size=sizes.pipeline_parallel,
            virtual_pipeline_model_parallel_size=sizes.pipeline_chunks if sizes.pipeline_chunks > 1 else None,
            context_parallel_size=sizes.context_parallel,
            expert_model_parallel_size=sizes.expert_parallel,
            expert_tensor_parallel_size=1,  # an expert is whole on its rank
            order=_ORDER,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(_SEED)
        _Joined.sizes, _Joined.world = sizes, dist.group.WORLD
    if _Joined.sizes != sizes:
        raise ValueError(
            f"a role of this process divides its model with megatron-core as {_Joined.sizes}, and another as {sizes}: "
            f"give all roles of a process that use it the same sizes"
        )
