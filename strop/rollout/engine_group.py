"""Engine of a rollout worker, and the weights it uses.

The native engine is made here, in the process of the worker, and lives as long as the worker does. Engines in processes
of their own may be lost, be several, and have weights of their own: those are in strop.rollout.replicas; a user's own
are in strop.rollout.registry. engine_setup.py chooses between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.controller.worker import FollowerAddress
from strop.engines.causal_lm import CausalLM
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.kinds import TrainableEngine
from strop.engines.model import load_model
from strop.engines.moe.layers import num_experts
from strop.engines.multimodal.vl_model import Reader
from strop.engines.pretrained_config import load_model_config
from strop.rollout.client import EngineClient, GenerateClient
from strop.rollout.config import RolloutConfig, check_trainable
from strop.rollout.native.engine import NativeEngine
from strop.rollout.registry import NATIVE
from strop.rollout.types import RolloutEngine
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.target import WeightTarget
from strop.rollout.weight_sync.types import Probe


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """Model, settings, device and weights that an engine is made for."""

    model: ModelConfig
    rollout: RolloutConfig
    device: str
    version: int
    """Policy version that the weights hold, or will when they have been written."""
    trained: TrainableEngine | None
    """The policy of a training role in this process; None for weights of the engine's own, which arrive."""
    max_tokens: int
    """Of the longest sequence; 0: unknown."""
    logs: Path | None
    rank: int
    node: str = ""
    """Address of this process's node, for an engine that spans several."""
    followers: tuple[FollowerAddress, ...] = ()
    """Processes that hold the devices of its other nodes."""


Place = EngineContext
"""Old name, until 0.3."""


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
    reader: Reader | None = None
    """Media reader of an engine whose model is in another process."""

    @property
    def media(self) -> Reader | None:
        """Media reader of prompts; None where the engine is given text alone."""
        return self.reader if self.policy is None else self.policy.media


def check_engine(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Refuse an engine that cannot generate with this model, before any process starts.

    Raises:
        ValueError: the sentence says why, and what to do.
    """
    if rollout.router_replay and not num_experts(load_model_config(model)):
        raise ValueError(
            "rollout.router_replay is true, but the model is dense, without experts to route to: set it to false"
        )
    if rollout.engine == NATIVE:
        return
    check_trainable(rollout)
    subprocess_config = rollout.own_processes
    if subprocess_config is not None:
        subprocess_config.installed()
        if model.dtype == "float64":
            raise ValueError(
                f"rollout.engine={rollout.engine} computes in float32, bfloat16 or float16, not in "
                f"model.dtype=float64: use native"
            )
    load_model_config(model)


def native_generation(context: EngineContext) -> Generation:
    """The native engine, with the policy of the training role in this process, or a copy whose weights arrive."""
    if context.trained is not None:
        policy = context.trained.model
        return Generation(engine=native_engine(context, policy), policy=policy, target=None)
    # Weights come with any adapter merged into them.
    policy = load_model(
        dataclasses.replace(context.model, lora=LoraConfig()), device=context.device, holds_half=True
    )
    policy.module.requires_grad_(False)
    target = ModuleTarget(policy.module)
    return Generation(engine=native_engine(context, policy), policy=policy, target=target)


def native_engine(context: EngineContext, policy: CausalLM) -> NativeEngine:
    """The native engine around a policy."""
    rollout = context.rollout
    return NativeEngine(
        policy,
        max_running=rollout.max_running,
        version=context.version,
        deterministic=rollout.deterministic,
        records_routing=rollout.router_replay,
    )


class EngineGroup:
    """The native engine of a worker, and the client that asks it; one asyncio loop calls it. Its weights are those of
    the policy in this process, or a copy that is received.

    A subclass does the same with engines in processes of their own, which all have the same weights.
    """

    client: GenerateClient
    """Asks the engines."""

    def __init__(self, generation: Generation, *, timeout_s: float) -> None:
        """Args:
        generation: the engine.
        timeout_s: rollout.timeout_s.
        """
        self._generation, self._timeout_s = generation, timeout_s
        self._most_held = math.inf  # bytes that updates leave beside an engine
        self.set_engine(generation.engine)

    @property
    def first(self) -> Generation:
        """One of the engines, for what they have in common."""
        return self._generation

    def set_engine(self, engine: RolloutEngine) -> None:
        """Ask `engine` in place of the first one, which it was made around (verification of received weights)."""
        self._engine = engine
        self.client = EngineClient(engine, timeout_s=self._timeout_s)

    def begin(self) -> None:
        """Start a call of the worker."""

    async def wake_up(self) -> None:
        """Every engine takes its memory again."""
        await self._engine.wake_up()

    async def leave(self, failure: str = "") -> None:
        """End a call of the worker: ranks whose parts of the matrices generate together end it together.

        Args:
            failure: why this one gives up; "" where it does not.
        """
        if isinstance(self._engine, NativeEngine):
            await self._engine.leave(failure)

    async def sleep(self) -> None:
        """Every engine gives its memory back; one that holds little of an accelerator keeps it, and with it the steps
        that were captured over it, which take seconds to capture again."""
        if not (isinstance(self._engine, NativeEngine) and self._engine.leaves_room(self._most_held)):
            await self._engine.sleep()

    def leave_for_updates(self, num_bytes: int) -> None:
        """From now on an engine that keeps its memory keeps no more than this."""
        self._most_held = num_bytes

    async def pause(self) -> None:
        """Every engine holds its requests where they are."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Every engine goes on after a pause."""
        await self._engine.resume()

    async def set_version(self, version: int) -> None:
        """Every engine holds this policy version; those with weights of their own take them over from the policy.

        Raises:
            Exception: an engine is lost and cannot be started again.
        """
        await self._engine.set_version(version)

    async def check(self, probe: Probe, version: int, *, limit_s: float) -> None:
        """Every engine whose weights cannot be read gives what the trainer's model gives. Those of the native one are
        the policy's own, or were read back when they arrived.

        Raises:
            SyncCorrupted: one does not, or gives nothing within `limit_s` seconds.
        """

    async def restart_failed_engines(self) -> int:
        """Start engines again that do not serve, without weights; their number. An engine in this process ends with it,
        so there is none."""
        return 0

    def pop_restarts(self) -> list[str]:
        """Take a sentence for each engine that was started again since the last call."""
        return []

    async def close(self) -> None:
        """End all of them."""
        await self._engine.close()
