"""Engines in processes of their own, as rollout workers and evaluations ask for them."""

from __future__ import annotations

from strop.rollout.processes.client import RolloutClient
from strop.rollout.processes.filling import loaded
from strop.rollout.processes.fleet import make_fleet as serving
from strop.rollout.processes.probing import probe_of
from strop.rollout.types import RolloutEngine

__all__ = ["client", "loaded", "probe_of", "serving"]


def client(engine: RolloutEngine, *, timeout_s: float) -> RolloutClient:
    """Asks an engine alone."""
    return RolloutClient([engine], timeout_s=timeout_s)
