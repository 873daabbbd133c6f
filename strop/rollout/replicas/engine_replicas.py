"""The engines of one rollout worker: replicas with the same weights, each started again where it is lost.

An engine in a process of its own may die, stand still or answer garbage at any moment. In the middle of a step its
requests go on elsewhere, or wait, behind the tokens that were heard of (`RolloutClient`); between steps the next call
finds out. In both cases another engine takes its place: with the weights of the policy as it is now, compared with it,
and only then asked for anything.

Concurrency: one asyncio loop. A replacement is filled in a thread, while nothing changes the policy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence

from strop.rollout.engine_group import EngineContext, EngineGroup, Generation
from strop.rollout.native.engine import NativeEngine
from strop.rollout.replicas.client import RolloutClient
from strop.rollout.types import RolloutEngine
from strop.rollout.weight_sync.load_weights import make_engine, pull_weights
from strop.rollout.weight_sync.probe import check_probe, probe_of
from strop.rollout.weight_sync.types import Probe, SyncCorrupted, UnverifiedWeights

logger = logging.getLogger(__name__)

MAX_RESTARTS = 8
"""Of one worker's engines within a call (samples of a step, a change of weights): what ends so many is no accident."""

RANKS_APART = 1000
"""Between the numbers of replicas in the names of their logs: rank 0 has vllm-0.log, vllm-1000.log, ..."""


class EngineReplicas(EngineGroup):
    """Engines with weights of their own, beside a policy in this process that is whole, or one engine of any kind."""

    def __init__(self, context: EngineContext, engines: Sequence[Generation]) -> None:
        """Take these engines.

        Args:
            context: that they were made for.
            engines: at least one.
        """
        self._context, self._engines = context, list(engines)
        self._trained = context.trained
        self._num_restarts = 0
        self._locks = [asyncio.Lock() for _ in engines]
        self._restarts: list[str] = []
        restart = self._restart if self._can_restart else None
        self.client: RolloutClient = RolloutClient(
            [replica.engine for replica in engines],
            timeout_s=context.rollout.timeout_s,
            restart=restart,
            records_routing=context.rollout.router_replay,
        )

    @property
    def first(self) -> Generation:
        """One of them, for what they have in common."""
        return self._engines[0]

    @property
    def _can_restart(self) -> bool:
        """Its weights can be had here at any moment: nobody else has to take part."""
        return (
            self._trained is not None
            and all(replica.target is not None for replica in self._engines)
            and not self._trained.model.is_sharded
        )

    def set_engine(self, engine: RolloutEngine) -> None:
        """Ask `engine` in place of the first one, which it was made around (verification of received weights)."""
        self._engines[0] = dataclasses.replace(self._engines[0], engine=engine)
        self.client.admit(0, engine)

    def begin(self) -> None:
        """Start a call of the worker: earlier restarts do not count."""
        self._num_restarts = 0

    async def wake_up(self) -> None:
        """Every engine takes its memory again."""
        await self._each(lambda replica: replica.engine.wake_up(), waits=True)

    async def leave(self, failure: str = "") -> None:
        """As EngineGroup; one of a user's own may be the native engine at heart."""
        for replica in self._engines:
            if isinstance(replica.engine, NativeEngine):
                await replica.engine.leave(failure)

    async def sleep(self) -> None:
        """Every engine gives its memory back."""
        await self._each(lambda replica: replica.engine.sleep(), waits=True)

    async def pause(self) -> None:
        """Every engine holds its requests where they are."""
        await self._each(lambda replica: replica.engine.pause(), waits=True)

    async def resume(self) -> None:
        """Every engine goes on after a pause."""
        await self._each(lambda replica: replica.engine.resume(), waits=True)

    async def set_version(self, version: int) -> None:
        """Every engine holds this policy version; those with weights of their own take them over from the policy.

        Raises:
            Exception: an engine is lost and cannot be started again.
        """
        self._context = dataclasses.replace(self._context, version=version)
        trained = self._trained
        if trained is None or self.first.target is None:
            await self._each(lambda replica: replica.engine.set_version(version))
            return

        async def take(replica: Generation) -> None:
            assert replica.target is not None, "as the first"
            if "frees_weights" in replica.engine.abilities:  # its cache comes when it generates
                await replica.engine.wake_up(("weights",))
            else:
                await replica.engine.wake_up()
            pull_weights(trained, replica.target)  # not in a thread: all ranks of a sharded policy take part
            await replica.engine.set_version(version)

        await self._each(take)

    async def check(self, probe: Probe, version: int, *, limit_s: float) -> None:
        """Every engine whose weights cannot be read gives what the trainer's model gives.

        Raises:
            SyncCorrupted: one does not, or gives nothing within `limit_s` seconds.
        """

        async def compare(replica: Generation) -> None:
            if replica.scores is None:
                return
            await replica.engine.wake_up()
            try:
                async with asyncio.timeout(limit_s):
                    log_probs = await replica.scores(probe.token_ids)
            except TimeoutError:
                raise SyncCorrupted(
                    f"sync {version}: the engine gave no log-probs of {len(probe.token_ids)} tokens for {limit_s:g} s, "
                    f"so nothing shows that it has the new weights"
                ) from None
            check_probe(probe, log_probs, version=version, dtype=replica.dtype)

        await self._each(compare, heals=False)

    def pop_restarts(self) -> list[str]:
        """Take a sentence for each engine that was started again since the last call."""
        messages, self._restarts = self._restarts, []
        return messages

    async def close(self) -> None:
        """End all of them."""
        await self.client.close()
        for replica in self._engines:
            await replica.engine.close()

    async def restart_failed_engines(self) -> int:
        """Start engines again that do not serve, without weights, and return their number; those that get weights here
        are left to it.

        Raises:
            Exception: one does not start.
        """
        if self._can_restart or self.first.target is None:
            return 0
        lost = [index for index, replica in enumerate(self._engines) if not await _serves(replica)]
        for index in lost:
            await self._engines[index].engine.close()
            self._engines[index] = await self._another(index)
            self.client.admit(index, self._engines[index].engine)
            self._restarts.append(
                f"rollout engine {index} was lost and started again, and what it had is played again"
            )
        return len(lost)

    async def _another(self, index: int) -> Generation:
        """An engine in the place of this one."""
        return await make_engine(
            dataclasses.replace(self._context, rank=self._context.rank + index * RANKS_APART)
        )

    async def _each(
        self, act: Callable[[Generation], Awaitable[None]], *, heals: bool = True, waits: bool = False
    ) -> None:
        """Do this with every engine; one that fails is replaced by one that has the current weights.

        Where that needs all ranks, one that fails `waits` for `restart_failed_engines`, or is an error.
        """
        for index, replica in enumerate(self._engines):
            try:
                await act(replica)
            except (OSError, RuntimeError, TimeoutError) as error:
                if not self._can_restart and waits and replica.target is not None:
                    logger.warning("rollout engine %d does not serve any more: %s", index, error)
                    continue
                if not heals or not self._can_restart:
                    raise
                logger.warning("rollout engine %d does not serve any more: %s", index, error)
                self.client.admit(index, await self._restart(index))

    async def _restart(self, index: int) -> RolloutEngine:
        """End what is left of an engine and start another one, which holds the current version.

        Raises:
            RuntimeError: too many were started again.
            Exception: it does not start, or does not compute with these weights.
        """
        lost = self._engines[index]
        async with self._locks[index]:
            if self._engines[index] is not lost:  # requests and an update noticed it at the same time
                return self._engines[index].engine
            return await self._start_in_place(index)

    async def _start_in_place(self, index: int) -> RolloutEngine:
        self._num_restarts += 1
        if self._num_restarts > MAX_RESTARTS:
            raise RuntimeError(
                f"its engines were lost {MAX_RESTARTS} times within one call, and are not started again"
            )
        trained, version = self._trained, self._context.version
        assert trained is not None, "asked for with a policy in this process"
        await self._engines[index].engine.close()
        replacement = await self._another(index)
        try:
            assert replacement.target is not None, "as the one before"
            await asyncio.to_thread(pull_weights, trained, replacement.target)
            await replacement.engine.set_version(version)
            if replacement.scores is not None:
                probe = await asyncio.to_thread(probe_of, trained)
                check_probe(
                    probe, await replacement.scores(probe.token_ids), version=version, dtype=replacement.dtype
                )
        except BaseException:
            await replacement.engine.close()
            raise
        self._engines[index] = replacement
        self._restarts.append(f"rollout engine {index} was lost and started again, at version {version}")
        return replacement.engine


async def _serves(replica: Generation) -> bool:
    """It generates a token within its own deadline."""
    try:
        await replica.engine.wake_up()
        await replica.engine.health()
    except UnverifiedWeights:
        return True  # its weights are still to come
    except (OSError, RuntimeError, TimeoutError) as error:
        logger.warning("a rollout engine does not serve any more: %s", error)
        return False
    return True


async def make_replicas(context: EngineContext) -> EngineReplicas:
    """The engines that `rollout.engine` and `rollout.replicas` ask for.

    Raises:
        ValueError: they cannot be used here.
    """
    replicas: list[Generation] = []
    try:
        for index in range(context.rollout.replicas):
            replica = await make_engine(dataclasses.replace(context, rank=context.rank + index * RANKS_APART))
            replicas.append(replica)
    except BaseException:
        for replica in replicas:
            await replica.engine.close()
        raise
    return EngineReplicas(context, replicas)
