"""A rollout engine that generates with verified weights only.

Concurrency: one asyncio loop calls it, as the engine inside. A sync runs in a thread while the loop goes on. Requests
that run are held meanwhile and go on with the new weights, where the engine is able to `update_in_flight`; else a sync
does not begin while one runs. Requests that come meanwhile wait for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from strop.rollout.types import Ability, Memory, OnToken, RolloutEngine, Sampling, TokenOutput
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.types import Endpoint, SyncReport


class VerifiedEngine:
    """An engine with its own copy of the weights, which arrive through a receiver."""

    def __init__(self, engine: RolloutEngine, receiver: WeightReceiver) -> None:
        self._engine = engine
        self._receiver = receiver
        self._num_running = 0
        self._is_paused = False
        self._is_updated = asyncio.Event()
        self._is_updated.set()

    def join(self, endpoint: Endpoint, *, index: int) -> None:
        """Meet the sender of the weights; raises as `WeightReceiver.join`. It waits, so not on the loop."""
        self._receiver.join(endpoint, index=index)

    async def update_weights(self, version: int) -> SyncReport:
        """Take part in the sync to this version; the engine's cache is flushed once, after the verification.

        Raises:
            SyncRefused: a request is running, and the engine cannot take weights meanwhile; its weights stay, and the
                sender is told.
            SyncError: the sync failed; generation is refused until a later one succeeds, and requests that run stay
                held.
        """
        if self._num_running and "update_in_flight" not in self._engine.abilities:
            reason = (
                f"it would overwrite the weights of {self._num_running} running requests; wait for them or abort them "
                f"first"
            )
            await asyncio.to_thread(self._receiver.refuse, version, reason)
        holds = self._num_running > 0 and not self._is_paused
        self._is_updated.clear()
        try:
            if holds:
                await self._engine.pause()
            report = await asyncio.to_thread(self._receiver.receive, version)
            await self._engine.set_version(version)
            if holds:
                await self._engine.resume()
        finally:
            self._is_updated.set()
        return report

    @property
    def abilities(self) -> frozenset[Ability]:
        """Abilities of the engine."""
        return self._engine.abilities

    @property
    def version(self) -> int:
        """As the engine says; whether it is verified is asked before anything is generated."""
        return self._engine.version

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """As the engine does.

        Raises:
            UnverifiedWeights: there is no verified version; the message says what happened to the last sync.
        """
        await self._is_updated.wait()
        self._receiver.require_verified(f"request {request_id}")
        self._num_running += 1
        try:
            return await self._engine.generate(request_id, prompt_ids, sampling, on_token=on_token)
        finally:
            self._num_running -= 1

    async def set_version(self, version: int) -> None:
        """Check that this is the verified version; nothing else happens here.

        Raises:
            UnverifiedWeights: there is no verified version.
            ValueError: it is another one.
        """
        verified = self._receiver.require_verified(f"setting version {version}")
        if verified != version:
            raise ValueError(f"version {version} was set, but the rollout worker holds version {verified}")

    async def pause(self) -> None:
        """As the engine does."""
        self._is_paused = True
        await self._engine.pause()

    async def resume(self) -> None:
        """As the engine does."""
        self._is_paused = False
        await self._engine.resume()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """As the engine does."""
        await self._engine.abort(request_ids)

    async def flush_cache(self) -> None:
        """As the engine does."""
        await self._engine.flush_cache()

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """As the engine does."""
        await self._engine.sleep(level)

    async def wake_up(self, tags: Sequence[Memory] | None = None) -> None:
        """As the engine does."""
        await (self._engine.wake_up() if tags is None else self._engine.wake_up(tags))

    async def close(self) -> None:
        """Leave the sender, and end the engine."""
        self._receiver.close()
        await self._engine.close()

    async def health(self) -> Mapping[str, float]:
        """As the engine does, with the verified version; while weights arrive, that it is paused.

        Raises:
            UnverifiedWeights: there is none: the engine cannot do its work.
        """
        if not self._is_updated.is_set():
            return {"version": float(self.version), "paused": 1.0, "running": float(self._num_running)}
        version = self._receiver.require_verified("a health check")
        return {**await self._engine.health(), "verified_version": float(version)}
