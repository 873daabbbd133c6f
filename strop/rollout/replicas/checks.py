"""Engines in processes of their own, and rollout workers apart: what does not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check(config: Config) -> None:
    """Refuse several engines of a rollout worker that has a process of its own.

    Raises:
        ValueError: the sentence says what to do.
    """
    if config.rollout.replicas > 1 and "rollout" in config.resources.apart:
        raise ValueError(
            f"rollout.replicas is {config.rollout.replicas} with resources.apart={{rollout: …}}, where each process "
            f"has one engine: raise the number of processes instead"
        )
