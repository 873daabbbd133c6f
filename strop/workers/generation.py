"""What generates in a rollout worker: the engine that `rollout.engine` names, and whose weights it uses.

Engines in processes of their own are guests (place "rollout engine"); those of a user's own are in
strop.rollout.registry.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strop.base.device import device_name
from strop.base.guests import joined
from strop.engines.adapters import merged_weights
from strop.engines.causal_lm import CausalLM
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.media import MediaReader
from strop.engines.model import load_model, read_shape, weights_of_folder
from strop.engines.packing import make_rows
from strop.engines.parallel import alone
from strop.engines.tokens import run_tokens
from strop.engines.training import TrainEngine
from strop.engines.weights import WeightsMetadata, parameter_stream, weights_metadata
from strop.rollout.config import RolloutConfig, check_trainable
from strop.rollout.native.engine import NativeEngine
from strop.rollout.registry import NATIVE, engines
from strop.rollout.sync.probe import Probe, probe_tokens
from strop.rollout.sync.target import ModuleTarget, WeightTarget
from strop.rollout.types import RolloutEngine


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an engine is to generate, and for what."""

    model: ModelConfig
    rollout: RolloutConfig
    device: str
    version: int
    """Policy version that the weights hold, or will when they have been written."""
    trained: TrainEngine | None
    """The policy of a training role in this process; None for weights of the engine's own, which arrive."""
    max_tokens: int
    """Of the longest sequence; 0: unknown."""
    logs: Path | None
    rank: int
    gate: Callable[[], Awaitable[None]] | None = None
    """Waited for before each step of an engine in this process."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An engine, and what is known of its weights."""

    engine: RolloutEngine
    policy: CausalLM | None
    """The model that generates, where it is in this process."""
    target: WeightTarget | None
    """Takes weights; None where they are those of a training role."""
    scores: Callable[[Sequence[int]], Coroutine[Any, Any, list[float]]] | None = None
    """Log-probs of all tokens but the first, of an engine whose weights cannot be read; None of others."""
    dtype: str = ""
    """Its precision."""
    reader: MediaReader | None = None
    """How an engine whose model is in another process is given media."""

    @property
    def media(self) -> MediaReader | None:
        """How prompts with media are read; None where the engine is given text alone."""
        return self.reader if self.policy is None else self.policy.media


async def make_generation(place: Place) -> Generation:
    """The engine that `rollout.engine` names.

    Raises:
        ValueError: it cannot be used here.
    """
    name = place.rollout.engine
    if name == NATIVE:
        return _native(place)
    make = joined("rollout engine", name) if place.rollout.own_processes else engines[name]
    made: Generation = await make(place)
    return made


async def load_generation(place: Place) -> Generation:
    """The engine that `rollout.engine` names, with the weights of the model folder: it generates without a trainer.

    An engine in another process gets them as it does in a run, and must give what the model in this process gives.

    Raises:
        ValueError: it cannot be used here.
        SyncCorrupted: it does not compute with these weights.
    """
    if place.rollout.engine == NATIVE:
        policy = load_model(place.model, device=place.device)
        engine = _native_engine(place, policy)
        return Generation(engine=engine, policy=policy, target=None)
    model = await asyncio.to_thread(load_model, place.model, device="cpu")
    made = await make_generation(place)
    if made.target is None:  # one of a user's own, which reads the folder itself
        return made
    try:
        await asyncio.to_thread(_fill, made.target, model)
        await made.engine.set_version(place.version)
        if made.scores is not None:
            probe = probe_of(model)
            found = await made.scores(probe.token_ids)
            probe.check(found, version=place.version, dtype=made.dtype)
    except BaseException:
        await made.engine.close()
        raise
    return made


def probe_of(model: CausalLM) -> Probe:
    """What a whole model in this process says of a few tokens."""
    ids = probe_tokens(model.config.get_text_config().vocab_size, never=model.media_tokens)
    rows = make_rows([torch.tensor(ids[:1])], [torch.tensor(ids[1:])])
    with torch.no_grad():
        log_probs, _ = run_tokens(model, rows, lambda one: one.log_probs(temperature=1.0), alone("cpu"))
    return Probe(token_ids=ids, log_probs=tuple(log_probs.tolist()))


def check_engine(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Refuse an engine that cannot generate with this model, before any process starts.

    Raises:
        ValueError: the sentence says why, and what to do.
    """
    if rollout.engine == NATIVE:
        return
    check_trainable(rollout)
    own = rollout.own_processes
    if own is not None:
        own.installed()
        if model.dtype == "float64":
            raise ValueError(
                f"rollout.engine={rollout.engine} computes in float32, bfloat16 or float16, not in "
                f"model.dtype=float64: use native"
            )
    read_shape(model)


def pull_weights(trained: TrainEngine, target: WeightTarget) -> None:
    """Write the policy of a training role into an engine with weights of its own; an adapter is merged.

    All ranks of a sharded policy call this.
    """
    trained.onload()
    _fill(target, trained.model)


def _fill(target: WeightTarget, model: CausalLM) -> None:
    weights = merged_weights(model)
    for bucket in parameter_stream(model.module, weights=weights):
        target.load([(weight.name, tensor) for weight, tensor in bucket.tensors()])


def _native(place: Place) -> Generation:
    if place.trained is not None:
        policy = place.trained.model
        return Generation(engine=_native_engine(place, policy), policy=policy, target=None)
    # Weights come with any adapter merged into them.
    policy = load_model(dataclasses.replace(place.model, lora=LoraConfig()), device=place.device)
    return Generation(engine=_native_engine(place, policy), policy=policy, target=ModuleTarget(policy.module))


def _native_engine(place: Place, policy: CausalLM) -> NativeEngine:
    rollout = place.rollout
    return NativeEngine(
        policy,
        max_running=rollout.max_running,
        version=place.version,
        deterministic=rollout.deterministic,
        gate=place.gate,
    )


@dataclass(frozen=True, kw_only=True)
class OwnProcess:
    """What an engine in another process is made for."""

    device: str
    dtype: str
    held: WeightsMetadata
    """The weights that it needs."""
    log: Path
    """A file for what it prints."""


def own_process(place: Place) -> OwnProcess:
    """What an engine of this place needs that is in processes of its own."""
    device = torch.device(device_name(place.device)).type
    trained = place.trained
    name = place.rollout.engine
    folder = Path(place.logs or tempfile.mkdtemp(prefix=f"strop-{name}-"))
    folder.mkdir(parents=True, exist_ok=True)
    return OwnProcess(
        device=device,
        dtype=place.model.dtype if place.model.dtype != "auto" else _AUTO_DTYPE[device],
        held=weights_of_folder(place.model) if trained is None else weights_metadata(trained.model.module),
        log=folder / f"{name}-{place.rank}.log",
    )


_AUTO_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
