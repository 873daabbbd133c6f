"""Engines in processes of their own, as rollout workers and evaluations ask for them."""

from __future__ import annotations

from strop.rollout.replicas.client import RolloutClient
from strop.rollout.replicas.engine_replicas import make_fleet as serving
from strop.rollout.types import RolloutEngine
from strop.rollout.weight_sync.load_weights import loaded
from strop.rollout.weight_sync.probe import probe_of

__all__ = ["client", "loaded", "probe_of", "serving"]


def client(engine: RolloutEngine, *, timeout_s: float) -> RolloutClient:
    """Asks an engine alone."""
    return RolloutClient([engine], timeout_s=timeout_s)
