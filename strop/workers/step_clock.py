"""A clock that counts engine steps, with which the order of everything follows from the seed: trainer.clock=virtual.

By the clock on the wall, what ends first depends on how fast scorers, tools and the machine are. By this one an engine
takes a step when every episode waits for a token, and whatever happened in between is entered in the order of its
names. Scoring and tools take no time.

Concurrency: one asyncio loop; an engine in the same process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from strop.rollout.client import GenerateClient
from strop.rollout.types import OnToken, Sampling, TokenOutput


class StepClock:
    """Lets the engine take a step when nobody is busy."""

    def __init__(self) -> None:
        self.now = 0
        """Engine steps so far."""
        self.on_settled: Callable[[], bool] = lambda: False
        """Called whenever all episodes wait for tokens, or have ended, before the next step; true: it has to wait until
        the next `look`."""
        self._num_busy = 0
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._gate: asyncio.Future[None] | None = None

    def begin(self, count: int = 1) -> None:
        """So many episodes begin, or have their answer and go on."""
        self._num_busy += count

    def end(self) -> None:
        """An episode has ended, or waits for an answer."""
        self._num_busy -= 1
        self.look()

    def look(self) -> None:
        """Go on where nobody is busy."""
        if self._num_busy == 0:
            asyncio.get_running_loop().call_soon(self._settle)

    async def turn(self, name: str) -> None:
        """Wait until all requests of this moment can enter the engine, in the order of their names."""
        self._waiting[name] = turn = asyncio.get_running_loop().create_future()
        self.end()
        await turn

    async def gate(self) -> None:
        """Wait until the next step may be taken; the engine calls it."""
        self._gate = asyncio.get_running_loop().create_future()
        self.look()
        await self._gate
        self.now += 1

    def _settle(self) -> None:
        if self._num_busy:
            return
        if self.on_settled():
            return
        if self._waiting:
            for name in sorted(self._waiting):
                turn = self._waiting.pop(name)
                if not turn.done():
                    turn.set_result(None)
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._settle)  # behind those that enter
        elif self._gate is not None and not self._gate.done():
            self._gate.set_result(None)


class ClockedClient:
    """A client whose requests enter by the clock; those that are of no episode it knows pass through."""

    def __init__(self, client: GenerateClient, clock: StepClock) -> None:
        self._client, self._clock = client, clock

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """As the client does."""
        await self._clock.turn(request_id)
        try:
            output = await self._client.generate(request_id, prompt_ids, sampling, on_token=on_token)
        except Exception:
            self._clock.begin()
            raise
        self._clock.begin()  # not where it was cancelled: then its episode is given up
        return output
