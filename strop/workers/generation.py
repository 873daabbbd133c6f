"""What generates in a rollout worker: an engine, and whose weights it uses.

The native engine is made here. Engines in processes of their own are guests (place "rollout engine"), those of a user's
own are in strop.rollout.registry; strop.workers.serving says who makes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.engines.causal_lm import CausalLM
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.media import MediaReader
from strop.engines.model import load_model, read_shape
from strop.engines.training import TrainEngine
from strop.rollout.config import RolloutConfig, check_trainable
from strop.rollout.native.engine import NativeEngine
from strop.rollout.registry import NATIVE
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


def native_generation(place: Place) -> Generation:
    """The native engine, with the policy of the training role in this process, or a copy whose weights arrive."""
    if place.trained is not None:
        policy = place.trained.model
        return Generation(engine=native_engine(place, policy), policy=policy, target=None)
    # Weights come with any adapter merged into them.
    policy = load_model(dataclasses.replace(place.model, lora=LoraConfig()), device=place.device)
    return Generation(engine=native_engine(place, policy), policy=policy, target=ModuleTarget(policy.module))


def native_engine(place: Place, policy: CausalLM) -> NativeEngine:
    """It generates with this policy."""
    rollout = place.rollout
    return NativeEngine(
        policy,
        max_running=rollout.max_running,
        version=place.version,
        deterministic=rollout.deterministic,
        gate=place.gate,
    )
