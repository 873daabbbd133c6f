"""The engines of one rollout worker, and who asks them.

The core asks one engine in the process of the worker, which lives as long as the worker does. Engines in processes of
their own may be lost, be several, and have weights of their own: those are a guest's (place "engines apart").
"""

from __future__ import annotations

from typing import Protocol

from strop.base.guests import needed
from strop.rollout.client import EngineClient, GenerateClient
from strop.rollout.config import RolloutConfig
from strop.rollout.registry import NATIVE
from strop.rollout.sync.probe import Probe
from strop.rollout.types import RolloutEngine
from strop.workers.generation import Generation, Place, native_generation


class Serving:
    """The native engine of a worker, and the client that asks it; one asyncio loop calls it. Its weights are those of
    the policy in this process, or a copy that is received.

    A guest's subclass does the same with engines in processes of their own, which all have the same weights.
    """

    client: GenerateClient
    """Asks the engines."""

    def __init__(self, made: Generation, *, timeout_s: float) -> None:
        """Args:
        made: the engine.
        timeout_s: rollout.timeout_s.
        """
        self._made, self._timeout_s = made, timeout_s
        self.replace_first(made.engine)

    @property
    def first(self) -> Generation:
        """One of the engines, for what they have in common."""
        return self._made

    def replace_first(self, engine: RolloutEngine) -> None:
        """Ask this one in place of the first engine, around which it was made."""
        self._engine = engine
        self.client = EngineClient(engine, timeout_s=self._timeout_s)

    def begin(self) -> None:
        """A call of the worker begins."""

    async def wake_up(self) -> None:
        """Every engine takes its memory again."""
        await self._engine.wake_up()

    async def sleep(self) -> None:
        """Every engine gives its memory back."""
        await self._engine.sleep()

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

    async def start_lost_again(self) -> int:
        """Start engines again that do not serve, without weights: how many. Those that get them here are left to it,
        and the native one ends with its process."""
        return 0

    def told(self) -> list[str]:
        """A sentence for each engine that was started again since the call before this one."""
        return []

    async def close(self) -> None:
        """End all of them."""
        await self._engine.close()


class EnginesApart(Protocol):
    """What a guest does for engines that are not the native one."""

    async def serving(self, place: Place) -> Serving:
        """The engines that `rollout.engine` and `rollout.replicas` ask for; raises as `make_serving`."""
        ...

    async def loaded(self, place: Place) -> Generation:
        """One of them with the weights of the model folder; raises as `strop.evaluation.loading.load_generation`."""
        ...

    def client(self, engine: RolloutEngine, *, timeout_s: float) -> GenerateClient:
        """Asks such an engine."""
        ...


async def make_serving(place: Place) -> Serving:
    """The engines that `rollout.engine` and `rollout.replicas` ask for.

    Raises:
        ValueError: they cannot be used here.
    """
    if place.rollout.engine == NATIVE:
        return Serving(native_generation(place), timeout_s=place.rollout.timeout_s)
    return await engines_apart(place.rollout).serving(place)


def engines_apart(rollout: RolloutConfig) -> EnginesApart:
    """What makes and asks engines that are not the native one.

    Raises:
        ValueError: nothing here does.
    """
    found: EnginesApart = needed("engines apart", f"rollout.engine={rollout.engine} is not the native one")
    return found
