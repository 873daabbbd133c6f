"""Engines that generate without a trainer."""

from __future__ import annotations

from strop.engines.model import load_model
from strop.rollout.client import EngineClient, GenerateClient
from strop.rollout.config import RolloutConfig
from strop.rollout.registry import NATIVE
from strop.rollout.types import RolloutEngine
from strop.workers.generation import Generation, Place, engines_apart, native_engine


async def load_generation(place: Place) -> Generation:
    """The engine that `rollout.engine` names, with the weights of the model folder: it generates without a trainer.

    An engine in another process gets them as it does in a run, and must give what the model in this process gives.

    Raises:
        ValueError: it cannot be used here.
        SyncCorrupted: it does not compute with these weights.
    """
    if place.rollout.engine == NATIVE:
        policy = load_model(place.model, device=place.device)
        return Generation(engine=native_engine(place, policy), policy=policy, target=None)
    return await engines_apart(place.rollout).loaded(place)


def client_of(engine: RolloutEngine, rollout: RolloutConfig) -> GenerateClient:
    """What asks an engine that `load_generation` gave."""
    if rollout.engine == NATIVE:
        return EngineClient(engine, timeout_s=rollout.timeout_s)
    return engines_apart(rollout).client(engine, timeout_s=rollout.timeout_s)
