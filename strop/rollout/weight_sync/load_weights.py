"""Engines with weights of their own, which are given those of a model in this process."""

from __future__ import annotations

import asyncio

from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig
from strop.engines.lora.adapters import merged_weights
from strop.engines.model import load_model
from strop.engines.training import Engine
from strop.rollout.engine_group import Generation, Place
from strop.rollout.registry import engines
from strop.rollout.sglang.joining import make_sglang
from strop.rollout.vllm.joining import make_vllm
from strop.rollout.weight_sync.probe import check_probe, probe_of
from strop.rollout.weight_sync.stream import parameter_stream
from strop.rollout.weight_sync.target import WeightTarget


async def make_engine(place: Place) -> Generation:
    """The engine that `rollout.engine` names, which is not the native one.

    Raises:
        ValueError: it cannot be used here.
    """
    name = place.rollout.engine
    if name == "vllm":
        return await make_vllm(place)
    if name == "sglang":
        return await make_sglang(place)
    made: Generation = await engines[name](place)
    return made


async def loaded(place: Place) -> Generation:
    """The same with the weights of the model folder, as it gets them in a run; it must give what the model in this
    process gives.

    Raises:
        ValueError: it cannot be used here.
        SyncCorrupted: it does not compute with these weights.
    """
    model = await asyncio.to_thread(load_model, place.model, device="cpu")
    made = await make_engine(place)
    if made.target is None:  # one of a user's own, which reads the folder itself
        return made
    try:
        await asyncio.to_thread(_fill, made.target, model)
        await made.engine.set_version(place.version)
        if made.scores is not None:
            probe = probe_of(Engine(model, EngineConfig(), is_frozen=True))
            found = await made.scores(probe.token_ids)
            check_probe(probe, found, version=place.version, dtype=made.dtype)
    except BaseException:
        await made.engine.close()
        raise
    return made


def pull_weights(trained: Engine, target: WeightTarget) -> None:
    """Write the policy of a role into an engine with weights of its own; an adapter is merged.

    All ranks of a sharded policy call this.
    """
    trained.load_to_device()
    _fill(target, trained.model)


def _fill(target: WeightTarget, model: CausalLM) -> None:
    weights = merged_weights(model)
    for bucket in parameter_stream(model.module, weights=weights):
        target.load([(weight.name, tensor) for weight, tensor in bucket.tensors()])
