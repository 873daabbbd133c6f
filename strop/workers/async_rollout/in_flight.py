"""Groups of samples in flight over several calls of a rollout worker.

A call starts groups; a later one waits until some have ended and takes them. What has not ended goes on in the call
after it, with other weights: each token says which version sampled it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial

from strop.protocol.trajectory import Prompt
from strop.rollout.types import Sampling
from strop.workers.episodes import Episode
from strop.workers.player import EpisodeRunner

Group = tuple[Episode, ...]


class GroupsInFlight:
    """Groups that were started in a worker and not taken yet. Everything but `add` is called on the loop."""

    def __init__(self, runner: EpisodeRunner, on_episode: Callable[[Episode], None]) -> None:
        """Args:
        runner: runs their episodes.
        on_episode: called with each sample as it ends.
        """
        self._runner, self._on_episode = runner, on_episode
        self._pending: list[tuple[Prompt, int, Sampling]] = []
        self._in_flight: dict[str, asyncio.Task[Group]] = {}
        self._completed: dict[str, asyncio.Task[Group]] = {}
        self._changed = asyncio.Event()
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing is played or about to be."""
        return not self._pending and not self._in_flight

    def completed_uids(self) -> list[str]:
        """Uids of groups that have ended and were not taken, first the one that ended first."""
        return list(self._completed)

    def add(self, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: Sampling) -> None:
        """These groups are started by the next `start` or `take`."""
        self._pending += [(prompt, samples_per_prompt, sampling) for prompt in prompts]

    async def start(self) -> None:
        """Start the groups that were added."""
        if not self._pending:
            return
        await self._runner.start()
        if not self._in_flight:
            self._busy_since = asyncio.get_running_loop().time()
        pending, self._pending = self._pending, []
        for prompt, count, sampling in pending:
            group = self._runner.run_group(
                prompt, samples_per_prompt=count, sampling=sampling, on_episode=self._on_episode
            )
            self._in_flight[prompt.uid] = task = asyncio.create_task(group)
            task.add_done_callback(partial(self._on_done, prompt.uid))

    def _on_done(self, uid: str, task: asyncio.Task[Group]) -> None:
        """Every sample of the group has ended, or an error ended it."""
        self._completed[uid] = task
        del self._in_flight[uid]
        if not self._in_flight:
            self._busy_s = self._busy_until_now()
            self._busy_since = None
        self._changed.set()

    async def take(self, due: frozenset[str], at_least: int, within_s: float | None = None) -> list[Group]:
        """The groups that have ended, first the one that ended first; they are forgotten here.

        Waits until all of `due` that are played here have ended, and `at_least` so many in all; where fewer are played,
        until all have ended. After `within_s` seconds it waits no longer.

        Raises:
            RewardError: the scorers cannot go on.
        """
        await self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.have_ended(due, at_least):
                    self._changed.clear()
                    await self._changed.wait()
        completed, self._completed = self._completed, {}
        return [task.result() for task in completed.values()]

    def have_ended(self, due: frozenset[str], at_least: int) -> bool:
        """True when `take` need not wait: its groups have ended, or one with an error."""
        if not self._in_flight or any(task.exception() for task in self._completed.values()):
            return True
        return len(self._completed) >= at_least and not self._in_flight.keys() & due

    async def drop(self, uids: Collection[str]) -> None:
        """Play these no longer; what they have is lost."""
        self._pending = [group for group in self._pending if group[0].uid not in uids]
        tasks = [self._in_flight[uid] for uid in uids if uid in self._in_flight]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for uid in uids:
            self._completed.pop(uid, None)

    async def busy_s(self) -> float:
        """Seconds in which something was played, by the clock of the loop."""
        return self._busy_until_now()

    def _busy_until_now(self) -> float:
        if self._busy_since is None:
            return self._busy_s
        return self._busy_s + asyncio.get_running_loop().time() - self._busy_since

    async def close(self) -> None:
        """End what is still played."""
        playing = list(self._in_flight.values())
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
