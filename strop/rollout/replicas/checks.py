"""Engines in processes of their own, and rollout workers apart: what does not go together."""

from __future__ import annotations

from strop.rollout.config import RolloutConfig


def check_replicas(rollout: RolloutConfig, *, is_apart: bool) -> None:
    """Refuse several engines of a rollout worker that has a process of its own.

    Args:
        rollout: section of the run.
        is_apart: resources.apart names the role.

    Raises:
        ValueError: the sentence says what to do.
    """
    if rollout.replicas > 1 and is_apart:
        raise ValueError(
            f"rollout.replicas is {rollout.replicas} with resources.apart={{rollout: …}}, where each process "
            f"has one engine: raise the number of processes instead"
        )
