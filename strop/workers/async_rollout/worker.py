"""Asynchronous rollout worker: one call starts groups, a later one takes those that have completed.

Where the policy is that of a training role in this process, unfinished groups are paused until the next call; elsewhere
they go on in a thread of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import torch

from strop.controller import Dispatch, register
from strop.engines.config import ModelConfig
from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt
from strop.rewards import RewardConfig
from strop.rollout.client import GenerateClient
from strop.rollout.config import RolloutConfig
from strop.rollout.routing.router import RouterAddress
from strop.rollout.types import EngineBusy, Sampling
from strop.rollout.weight_sync.types import Probe, SyncReport
from strop.run.replay_schedule import Spans
from strop.utils.background_loop import EventLoopThread
from strop.utils.call_loop import CallEventLoop, quiet
from strop.workers.async_rollout.generation_cache import GenerationCache
from strop.workers.async_rollout.in_flight import Group, GroupsInFlight
from strop.workers.async_rollout.recorded_schedule import RecordedSchedule
from strop.workers.async_rollout.saved_group import SavedGroup
from strop.workers.async_rollout.score_cache import ScoreCache
from strop.workers.episode_scores import Scorers
from strop.workers.episodes import Episode
from strop.workers.reports import episode_report
from strop.workers.rollout import EventLoop, RolloutSettings, RolloutWorker

T = TypeVar("T")


class AsyncRolloutWorker(RolloutWorker):
    """Rollout role whose groups are in flight over several calls."""

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, reward: RewardConfig, settings: RolloutSettings
    ) -> None:
        """As RolloutWorker."""
        self._runs_between_calls = settings.share_with is None and rollout.is_streamed
        self._is_paused = False
        self._schedule = RecordedSchedule(settings.version) if settings.is_replayed else None
        super().__init__(model, rollout, reward, settings)
        self._groups = GroupsInFlight(self._episode_runner, self._on_group_episode)
        if self._runs_between_calls:
            self._event_loop.run(_use_threads(torch.get_num_threads()))

    def _make_event_loop(self) -> EventLoop:
        return EventLoopThread("rollout") if self._runs_between_calls else CallEventLoop()

    def _clients(self) -> tuple[GenerateClient, Scorers]:
        client, _ = super()._clients()
        self._generations = GenerationCache(client, self._schedule)
        self._scores = ScoreCache(self._pool)
        return self._generations, self._scores

    def _together(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Engines that go on between calls serve others at any time, so that nobody waits for the end of a call. What a
        step began goes on beside a validation, whether or not the step had to wait."""
        return self._beside_groups(work)

    async def _beside_groups(self, work: Coroutine[Any, Any, T]) -> T:
        await self._start_groups()
        await self._go_on()
        return await work

    async def _start_groups(self) -> None:
        """Start the groups that were added. In the process of a training role the engine stands still until agents
        have asked for what they need: how many tokens a group has then depends neither on the call that started it, nor
        on an interruption before. Not so where ranks generate together: another one's requests keep it going."""
        if not self._runs_between_calls and not self._groups.is_idle:
            await self._pause()
        await self._groups.start()
        if self._is_paused:
            await quiet()

    async def _pause(self) -> None:
        if not self._is_paused:
            await self._engines.pause()
            self._is_paused = True

    async def _go_on(self) -> None:
        if self._is_paused:
            await self._engines.resume()
            self._is_paused = False

    def join_router(self, address: RouterAddress) -> None:
        """As RolloutWorker, for engines that go on between calls."""
        super().join_router(address)
        self._event_loop.run(self._serve_others())

    async def _serve_others(self) -> None:
        self._routed.begin(self._engines.first.engine.version)

    def _on_group_episode(self, episode: Episode) -> None:
        """A sample of a group in flight has ended."""
        self._on_episode(episode)
        if self._schedule is not None:
            self._schedule.ended(episode.id)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def start_groups(self, prompts: DataProto, samples_per_prompt: int, sampling: Sampling) -> None:
        """Start every sample of these prompts; `take_completed` gives them. Arguments are those of `run_episodes`.

        Column `saved` has the state of each in an earlier process (`SavedGroup`), column `spans` the versions
        that have to sample it (`Spans`; empty: all may).
        """
        columns = prompts.non_tensor_batch
        batch: list[Prompt] = list(columns["prompt"])
        self._check_media(batch)
        for prompt, saved, spans in zip(batch, columns["saved"], columns["spans"], strict=True):
            self._generations.restore(prompt.uid, saved.requests)
            self._scores.restore(prompt.uid, saved.scores)
            if self._schedule is not None:
                self._schedule.follow(prompt.uid, spans)
        self._groups.add(batch, samples_per_prompt, sampling)
        if self._runs_between_calls:
            with self._generating():
                self._event_loop.run(self._start_groups())

    @register(dispatch_mode=Dispatch.DP_GATHER_PROTO, blocking=False)
    def take_completed(self, due: Sequence[str], at_least: int, within_s: float | None = None) -> DataProto:
        """Samples of prompts that were begun and have ended, each given once; those of a prompt together.

        Waits until the prompts of `due` that are played here have ended, and `at_least` so many in all. The others go
        on: meanwhile, where generation has processes of its own, else in the next call.

        Args:
            due: uids; those of other workers among them.
            at_least: prompts of this worker.
            within_s: seconds after which it gives what it has; None: it waits.

        Returns:
            As `run_episodes`, first the prompt that ended first; possibly none.
        """
        with self._generating():
            groups = self._event_loop.run(self._take(frozenset(due), at_least, within_s))
        episodes = [episode for group in groups for episode in group]
        reports = [episode_report(episode) for episode in episodes]
        return DataProto.from_dict({}, non_tensors={"report": reports, "episode": episodes})

    async def _take(self, due: frozenset[str], at_least: int, within_s: float | None) -> list[Group]:
        await self._start_groups()
        if self._schedule is not None:
            await self._go_on()
            await self._schedule.caught_up()
        if not self._groups.have_ended(due, at_least):
            await self._go_on()
        return await self._groups.take(due, at_least, within_s)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def uids_in_play(self) -> list[str]:
        """Prompts that were begun here and not forgotten, also those that were given."""
        return self._generations.uids()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def forget(self, uids: Sequence[str]) -> dict[str, Spans]:
        """These prompts need not be played again, whatever happens; by uid of those of this worker, which versions
        sampled them."""
        self._scores.forget(uids)
        return self._generations.forget(uids)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drop(self, uids: Sequence[str]) -> int:
        """Play these prompts no longer, and forget them; how many tokens they had here."""
        self._event_loop.run(self._groups.drop(uids))
        spans = self.forget(uids)
        return sum(count for requests in spans.values() for pairs in requests.values() for _, count in pairs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def saved_groups(self) -> tuple[dict[str, SavedGroup], list[str]]:
        """By uid, how far the prompts are that were begun here and not forgotten; and which of those that were not
        given yet have ended, the first one first."""
        return self._event_loop.run(self._saved_groups())

    async def _saved_groups(self) -> tuple[dict[str, SavedGroup], list[str]]:
        scores = self._scores.saved()
        groups = {
            uid: SavedGroup(requests=states, scores=scores.get(uid, {}))
            for uid, states in (await self._generations.states()).items()
        }
        return groups, self._groups.completed_uids()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def differing_requests(self) -> list[str]:
        """Ids of requests that were not those of an earlier process, since the call before this one."""
        request_ids, self._generations.differing = self._generations.differing, []
        return request_ids

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def busy_s(self) -> float:
        """Seconds in which prompts that were begun were played."""
        return self._event_loop.run(self._groups.busy_s())

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        with super()._generating():
            yield
            if not self._runs_between_calls and not self._groups.is_idle:
                self._event_loop.run(self._pause())

    def set_version(self, version: int) -> None:
        """As RolloutWorker."""
        super().set_version(version)
        self._reached(version)

    def receive_weights(self, version: int) -> SyncReport:
        """As RolloutWorker."""
        report = super().receive_weights(version)
        if not report.failure:
            self._reached(version)
        return report

    def _reached(self, version: int) -> None:
        self._event_loop.run(self._serve_others())
        if self._schedule is not None:
            self._event_loop.run(self._schedule.reach(version))

    def check_weights(self, probe: Probe, version: int) -> None:
        """As RolloutWorker."""
        if self._is_paused:  # an engine that is paused scores nothing either
            self._event_loop.run(self._engines.resume())
        super().check_weights(probe, version)
        if self._is_paused:
            self._event_loop.run(self._engines.pause())

    def sleep(self) -> None:
        """As RolloutWorker, unless an engine of its own is at work, for groups of this worker or, by the router, for
        another one."""
        if not (self._groups.is_idle or (self._is_paused and self._target is None)):
            return
        try:
            super().sleep()
        except EngineBusy:
            if not self._runs_between_calls:  # then nobody else is served between two calls
                raise

    def close(self) -> None:
        """As RolloutWorker."""
        if not self._is_closed:
            self._event_loop.run(self._groups.close())
        super().close()


async def _use_threads(count: int) -> None:
    """Set the number of threads in the thread of the loop, which begins with a number of its own."""
    torch.set_num_threads(count)
