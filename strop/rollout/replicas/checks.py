"""Engines in processes of their own, their devices, and rollout workers apart: combinations that are refused."""

from __future__ import annotations

from strop.rollout.config import RolloutConfig


def check_replicas(rollout: RolloutConfig, *, is_apart: bool, is_on_ray: bool) -> None:
    """Refuse several engines of a rollout worker that has a process of its own, and engines over more devices than
    their process is given.

    Args:
        rollout: section of the run.
        is_apart: resources.apart names the role.
        is_on_ray: each process has devices of its own.

    Raises:
        ValueError: the sentence says what to do.
    """
    if rollout.replicas > 1 and is_apart:
        raise ValueError(
            f"rollout.replicas is {rollout.replicas} with resources.apart={{rollout: …}}, where each process "
            f"has one engine: raise the number of processes instead"
        )
    if rollout.num_devices > 1 and is_on_ray and not is_apart:
        raise ValueError(
            f"an engine of rollout.{rollout.engine} spans tensor_parallel x pipeline_parallel = {rollout.num_devices} "
            f"devices, but the processes of the trainer have one each: give generation processes of its own with "
            f"resources.apart={{rollout: N}}, N engines of {rollout.num_devices} devices each"
        )
