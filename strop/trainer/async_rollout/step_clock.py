"""A clock that counts engine steps, with which the order of everything follows from the seed: trainer.clock=virtual.

By the clock on the wall, what ends first depends on how fast scorers, tools and the machine are. By this one an engine
takes a step when every episode waits for a token, and whatever happened in between is entered in the order of its
names. Scoring and tools take no time but what `sleep` lets pass.

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
        self.num_asked = 0
        """Requests that the engine has."""
        self._num_busy = 0
        self._asleep: dict[str, tuple[int, asyncio.Future[None]]] = {}
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

    async def sleep(self, name: str, steps: int) -> None:
        """Let so many steps pass; where the engine has nothing to do, they pass at once."""
        if steps <= 0:
            return
        self._asleep[name] = self.now + steps, asyncio.get_running_loop().create_future()
        self.end()
        try:
            await self._asleep[name][1]
        finally:
            del self._asleep[name]

    async def gate(self) -> None:
        """Wait until the next step may be taken; the engine calls it."""
        self._gate = asyncio.get_running_loop().create_future()
        self.look()
        await self._gate
        self.now += 1

    def _settle(self) -> None:
        if self._num_busy or self._wake() or self.on_settled():
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
        elif (
            self._asleep and not self.num_asked
        ):  # nothing is generated: the next thing is that somebody wakes
            self.now = min(due for due, _ in self._asleep.values())
            self.look()

    def _wake(self) -> bool:
        """Those whose time has come go on; whether there are any."""
        names = sorted(name for name, (due, _) in self._asleep.items() if due <= self.now)
        for name in names:
            self.begin()
            self._asleep[name][1].set_result(None)
        return bool(names)


class ClockedClient:
    """A client whose requests enter by the clock; whoever asks has told it that an episode begins, and when it ends."""

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
        self._clock.num_asked += 1
        try:
            output = await self._client.generate(request_id, prompt_ids, sampling, on_token=on_token)
        except Exception:
            self._clock.begin()
            raise
        finally:
            self._clock.num_asked -= 1
        self._clock.begin()  # not where it was cancelled: then its episode is given up
        return output
