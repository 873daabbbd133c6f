"""Engines with weights of their own, which are given those of a model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig
from strop.engines.kinds import ModelEngine
from strop.engines.lora.adapters import merged_weights
from strop.engines.model import load_model
from strop.engines.training import Engine
from strop.rollout.engine_group import EngineContext, Generation
from strop.rollout.registry import engines
from strop.rollout.sglang.launch import make_sglang
from strop.rollout.vllm.launch import make_vllm
from strop.rollout.weight_sync.probe import check_probe, probe_of
from strop.rollout.weight_sync.stream import parameter_stream
from strop.rollout.weight_sync.target import WeightTarget


async def make_engine(context: EngineContext) -> Generation:
    """The engine that `rollout.engine` names, which is not the native one.

    Raises:
        ValueError: it cannot be used here.
    """
    name = context.rollout.engine
    if name == "vllm":
        return await make_vllm(context)
    if name == "sglang":
        return await make_sglang(context)
    generation: Generation = await engines[name](context)
    return generation


async def loaded(context: EngineContext) -> Generation:
    """The same with the weights of the model folder, as it gets them in a run; it must give what the model in this
    process gives.

    Raises:
        ValueError: it cannot be used here.
        SyncCorrupted: it does not compute with these weights.
    """
    model = await asyncio.to_thread(load_model, context.model, device="cpu")
    generation = await make_engine(context)
    if generation.target is None:  # one of a user's own, which reads the folder itself
        return generation
    try:
        await asyncio.to_thread(_fill, generation.target, model, merged_weights(model))
        await generation.engine.set_version(context.version)
        if generation.scores is not None:
            probe = probe_of(Engine(model, EngineConfig(), is_frozen=True))
            log_probs = await generation.scores(probe.token_ids)
            check_probe(probe, log_probs, version=context.version, dtype=generation.dtype)
    except BaseException:
        await generation.engine.close()
        raise
    return generation


def pull_weights(trained: ModelEngine, target: WeightTarget) -> None:
    """Write the policy of a role into an engine with weights of its own; an adapter is merged.

    All ranks of a sharded policy call this.
    """
    trained.load_to_device()
    _fill(target, trained.model, trained.streamed_weights())


def _fill(target: WeightTarget, model: CausalLM, weights: Iterator[tuple[str, Tensor]] | None) -> None:
    dtypes = target.weights_metadata().dtypes
    for bucket in parameter_stream(model.module, weights=weights, dtypes=dtypes):
        target.load([(weight.name, tensor) for weight, tensor in bucket.tensors()])
