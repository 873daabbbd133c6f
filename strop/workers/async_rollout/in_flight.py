"""Groups of samples that are played over several calls of a rollout worker.

A call begins groups; a later one waits until some have ended and takes them. What has not ended goes on in the call
after it, with other weights: each token says which version sampled it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from strop.protocol.trajectory import Prompt
from strop.rollout.types import Sampling
from strop.trainer.async_rollout.step_clock import StepClock
from strop.trainer.async_rollout.virtual_time import VirtualTime
from strop.workers.episodes import Episode
from strop.workers.player import Player

Group = tuple[Episode, ...]


class GroupsInFlight:
    """What was begun in a worker and not taken yet. Everything but `add` is called on the loop."""

    def __init__(
        self,
        player: Player,
        on_episode: Callable[[Episode], None],
        *,
        clock: StepClock | None = None,
        time: VirtualTime | None = None,
    ) -> None:
        """Args:
        player: plays them.
        on_episode: hears of each sample as it ends.
        clock: decides what ends first; None: that of the wall.
        time: how much later samples end by that clock than their tokens say.
        """
        self._player, self._on_episode, self._clock, self._time = player, on_episode, clock, time
        self._due: dict[str, dict[str, int]] = {}  # by uid and sample number, when it ends by the clock
        if clock is not None:
            clock.on_settled = self._settle
        self._unsettled: dict[str, asyncio.Task[Group]] = {}
        self._num_left: dict[str, int] = {}  # samples of groups, where the clock counts
        self._added: list[tuple[Prompt, int, Sampling]] = []
        self._playing: dict[str, asyncio.Task[Group]] = {}
        self._ended: dict[str, asyncio.Task[Group]] = {}
        self._changed = asyncio.Event()
        self._wanted: tuple[frozenset[str], int] | None = None
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing is played or about to be."""
        return not self._added and not self._playing

    def ended_uids(self) -> list[str]:
        """Those that have ended and were not taken, first the one that ended first."""
        return list(self._ended)

    def follow(self, uid: str, steps_left: Mapping[str, int]) -> None:
        """Samples of this prompt end as an earlier process has it: by number, so many engine steps from now."""
        if self._clock is not None:
            self._due[uid] = {number: self._clock.now + steps for number, steps in steps_left.items()}

    def steps_left(self) -> dict[str, dict[str, int]]:
        """By uid and sample number, of those that have all their tokens, how many engine steps they still take."""
        now = 0 if self._clock is None else self._clock.now
        return {
            uid: {number: max(due - now, 0) for number, due in own.items()} for uid, own in self._due.items()
        }

    def add(self, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: Sampling) -> None:
        """These groups are begun by the next `start` or `take`."""
        self._added += [(prompt, samples_per_prompt, sampling) for prompt in prompts]

    async def start(self) -> None:
        """Begin what was added."""
        if not self._added:
            return
        await self._player.begin()
        if not self._playing:
            self._busy_since = asyncio.get_running_loop().time()
        added, self._added = self._added, []
        if self._clock is not None:
            self._clock.begin(sum(count for _, count, _ in added))
            self._num_left |= {prompt.uid: count for prompt, count, _ in added}
        for prompt, count, sampling in added:
            group = self._player.group(
                prompt,
                samples_per_prompt=count,
                sampling=sampling,
                on_episode=self._hear,
                after=self.pass_time,
            )
            self._playing[prompt.uid] = task = asyncio.create_task(group)
            task.add_done_callback(partial(self._note, prompt.uid))

    async def pass_time(self, episode: Episode) -> None:
        """Wait as long as the time that was given says of this sample, by the clock."""
        if self._clock is None or self._time is None:
            return
        own, number = self._due.setdefault(episode.prompt.uid, {}), str(episode.sample_index)
        if number not in own:
            num_tokens = 0 if episode.trajectory is None else len(episode.trajectory.response_ids)
            steps = self._time.steps_after(episode.prompt.uid, episode.sample_index, num_tokens)
            own[number] = self._clock.now + steps
        await self._clock.sleep(episode.id, own[number] - self._clock.now)

    def _hear(self, episode: Episode) -> None:
        self._on_episode(episode)
        if self._clock is not None:
            self._num_left[episode.prompt.uid] -= 1
            if self._num_left[episode.prompt.uid]:
                self._clock.end()  # the last one ends with its group

    def _note(self, uid: str, task: asyncio.Task[Group]) -> None:
        if self._clock is None or task.cancelled() or task.exception():
            self._enter(uid)
        else:
            self._unsettled[uid] = task  # it counts once all that ends at this moment has ended
            del self._num_left[uid]
            self._clock.end()

    def _settle(self) -> bool:
        for uid in [uid for uid in self._playing if uid in self._unsettled]:
            self._enter(uid)
        self._unsettled.clear()
        return self._wanted is not None and self._has(*self._wanted)

    def _enter(self, uid: str) -> None:
        self._ended[uid] = self._playing.pop(uid)
        if not self._playing:
            self._busy_s = self._busy_until_now()
            self._busy_since = None
        self._changed.set()

    async def take(self, due: Collection[str], at_least: int, within_s: float | None = None) -> list[Group]:
        """The groups that have ended, first the one that ended first; they are forgotten here.

        Waits until all of `due` that are played here have ended, and `at_least` so many in all; where fewer are played,
        until all have ended. After `within_s` seconds it waits no longer.

        Raises:
            RewardError: the scorers cannot go on.
        """
        await self.start()
        self._wanted = frozenset(due), at_least
        if self._clock is not None:
            self._clock.look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self._has(*self._wanted):
                    self._changed.clear()
                    await self._changed.wait()
        self._wanted = None
        ended, self._ended = self._ended, {}
        return [task.result() for task in ended.values()]

    def _has(self, due: frozenset[str], at_least: int) -> bool:
        """What `take` waits for is there, or an error."""
        if not self._playing or any(task.exception() for task in self._ended.values()):
            return True
        return len(self._ended) >= at_least and not self._playing.keys() & due

    def forget(self, uids: Collection[str]) -> None:
        """These were trained, or are given up."""
        for uid in uids:
            self._due.pop(uid, None)

    async def drop(self, uids: Collection[str]) -> None:
        """Play these no longer; what they have is lost."""
        self._added = [one for one in self._added if one[0].uid not in uids]
        tasks = [self._playing[uid] for uid in uids if uid in self._playing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for uid in uids:
            self._ended.pop(uid, None)
            self._num_left.pop(uid, None)

    @property
    def clock_steps(self) -> int:
        """Time by the clock that was given; 0 without one."""
        return 0 if self._clock is None else self._clock.now

    async def busy_s(self) -> float:
        """Seconds in which something was played, by the clock of the loop."""
        return self._busy_until_now()

    def _busy_until_now(self) -> float:
        if self._busy_since is None:
            return self._busy_s
        return self._busy_s + asyncio.get_running_loop().time() - self._busy_since

    async def close(self) -> None:
        """End what is still played."""
        playing = list(self._playing.values())
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
