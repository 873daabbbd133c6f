"""The engines of a rollout worker, by rollout.engine and rollout.replicas."""

from __future__ import annotations

from strop.rollout.engine_group import Place, Serving, native_generation
from strop.rollout.registry import NATIVE
from strop.rollout.replicas.engine_replicas import make_fleet


async def make_serving(place: Place) -> Serving:
    """The engines that `rollout.engine` and `rollout.replicas` ask for.

    Raises:
        ValueError: they cannot be used here.
    """
    if place.rollout.engine == NATIVE:
        return Serving(native_generation(place), timeout_s=place.rollout.timeout_s)
    return await make_fleet(place)
