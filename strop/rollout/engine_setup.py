"""The engines of a rollout worker, by rollout.engine and rollout.replicas."""

from __future__ import annotations

from strop.rollout.engine_group import EngineContext, EngineGroup, native_generation
from strop.rollout.registry import NATIVE
from strop.rollout.replicas.engine_replicas import make_replicas


async def make_engine_group(context: EngineContext) -> EngineGroup:
    """The engines that `rollout.engine` and `rollout.replicas` ask for.

    Raises:
        ValueError: they cannot be used here.
    """
    if context.rollout.engine == NATIVE:
        return EngineGroup(native_generation(context), timeout_s=context.rollout.timeout_s)
    return await make_replicas(context)
