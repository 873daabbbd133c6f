"""Generation whose samples are played over several calls.

Prompts are begun by one call, and a later one takes those that have ended. Where the policy is that of a training role
in this process, what goes on afterwards is held until the next call; elsewhere it goes on in a thread of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from strop.controller import Dispatch, register
from strop.engines.config import ModelConfig
from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt
from strop.rewards import RewardConfig
from strop.rollout.client import GenerateClient
from strop.rollout.config import RolloutConfig
from strop.rollout.types import Sampling
from strop.rollout.weight_sync.types import Probe, SyncReport
from strop.run.replay_schedule import Spans
from strop.utils.background_loop import ThreadRunner
from strop.utils.call_loop import CallRunner
from strop.workers.async_rollout.generation_cache import GenerationCache
from strop.workers.async_rollout.in_flight import GroupsInFlight
from strop.workers.async_rollout.recorded_schedule import RecordedSchedule
from strop.workers.async_rollout.saved_group import SavedGroup
from strop.workers.async_rollout.score_cache import ScoreCache
from strop.workers.episodes import Episode
from strop.workers.player import Scorers
from strop.workers.reports import report_of
from strop.workers.rollout import Playing, RolloutWorker, Runner


class AheadWorker(RolloutWorker):
    """As RolloutWorker; it remembers what is in play."""

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, reward: RewardConfig, playing: Playing
    ) -> None:
        """As RolloutWorker."""
        self._goes_on = playing.share_with is None and rollout.is_streamed
        self._is_held = False
        self._schedule = RecordedSchedule(playing.version) if playing.is_replayed else None
        super().__init__(model, rollout, reward, playing)
        self._groups = GroupsInFlight(self._player, self._hear)
        if self._goes_on:
            self._runner.run(_use_threads(torch.get_num_threads()))

    def _make_runner(self) -> Runner:
        return ThreadRunner("rollout") if self._goes_on else CallRunner()

    def _asked(self) -> tuple[GenerateClient, Scorers]:
        client, _ = super()._asked()
        self._generations = GenerationCache(client, self._schedule)
        self._scores = ScoreCache(self._pool)
        return self._generations, self._scores

    def _hear(self, episode: Episode) -> None:
        """A sample of a group in flight has ended."""
        self._hear_played(episode)
        if self._schedule is not None:
            self._schedule.ended(episode.id)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def begin(self, prompts: DataProto, samples_per_prompt: int, sampling: Sampling) -> None:
        """Begin every sample of these prompts; `ended` gives them. Arguments are those of `play`.

        Column `kept` says of each how far an earlier process came with it (`SavedGroup`), column `spans` which versions
        have to sample what (`Spans`; empty: all may).
        """
        columns = prompts.non_tensor_batch
        asked: list[Prompt] = list(columns["prompt"])
        self._refuse_media(asked)
        for prompt, kept, spans in zip(asked, columns["kept"], columns["spans"], strict=True):
            self._generations.restore(prompt.uid, kept.requests)
            self._scores.restore(prompt.uid, kept.scores)
            if self._schedule is not None:
                self._schedule.follow(prompt.uid, spans)
        self._groups.add(asked, samples_per_prompt, sampling)
        if self._goes_on:
            with self._generating():
                self._runner.run(self._groups.start())

    @register(dispatch_mode=Dispatch.DP_GATHER_PROTO, blocking=False)
    def ended(self, due: Sequence[str], at_least: int, within_s: float | None = None) -> DataProto:
        """Samples of prompts that were begun and have ended, each given once; those of a prompt together.

        Waits until the prompts of `due` that are played here have ended, and `at_least` so many in all. The others go
        on: meanwhile, where generation has processes of its own, else in the next call.

        Args:
            due: uids; those of other workers among them.
            at_least: prompts of this worker.
            within_s: seconds after which it gives what it has; None: it waits.

        Returns:
            As `play`, first the prompt that ended first; possibly none.
        """
        with self._generating():
            if self._schedule is not None:
                self._runner.run(self._groups.start())
                self._runner.run(self._schedule.caught_up())
            groups = self._runner.run(self._groups.take(due, at_least, within_s))
        episodes = [episode for group in groups for episode in group]
        reports = [report_of(episode) for episode in episodes]
        return DataProto.from_dict({}, non_tensors={"report": reports, "episode": episodes})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def forget(self, uids: Sequence[str]) -> dict[str, Spans]:
        """These prompts need not be played again, whatever happens; by uid of those of this worker, which versions
        sampled them."""
        self._scores.forget(uids)
        return self._generations.forget(uids)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drop(self, uids: Sequence[str]) -> int:
        """Play these prompts no longer, and forget them; how many tokens they had here."""
        self._runner.run(self._groups.drop(uids))
        spans = self.forget(uids)
        return sum(count for own in spans.values() for pairs in own.values() for _, count in pairs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept(self) -> tuple[dict[str, SavedGroup], list[str]]:
        """By uid, how far the prompts are that were begun here and not forgotten; and which of those that were not
        given yet have ended, the first one first."""
        return self._runner.run(self._kept())

    async def _kept(self) -> tuple[dict[str, SavedGroup], list[str]]:
        scores = self._scores.saved()
        kept = {
            uid: SavedGroup(requests=states, scores=scores.get(uid, {}))
            for uid, states in (await self._generations.states()).items()
        }
        return kept, self._groups.completed_uids()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def differing_requests(self) -> list[str]:
        """Ids of requests that were not those of an earlier process, since the call before this one."""
        told, self._generations.differing = self._generations.differing, []
        return told

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def busy_s(self) -> float:
        """Seconds in which prompts that were begun were played."""
        return self._runner.run(self._groups.busy_s())

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        with super()._generating():
            if self._is_held:
                self._runner.run(self._engines.resume())
                self._is_held = False
            yield
            if not self._goes_on and not self._groups.is_idle:
                self._runner.run(self._engines.pause())
                self._is_held = True

    def set_version(self, version: int) -> None:
        """As RolloutWorker."""
        super().set_version(version)
        self._reached(version)

    def receive_weights(self, version: int) -> SyncReport:
        """As RolloutWorker."""
        report = super().receive_weights(version)
        self._reached(version)
        return report

    def _reached(self, version: int) -> None:
        if self._schedule is not None:
            self._runner.run(self._schedule.reach(version))

    def check_weights(self, probe: Probe, version: int) -> None:
        """As RolloutWorker."""
        if self._is_held:  # an engine that is paused scores nothing either
            self._runner.run(self._engines.resume())
        super().check_weights(probe, version)
        if self._is_held:
            self._runner.run(self._engines.pause())

    def sleep(self) -> None:
        """As RolloutWorker, unless an engine of its own is at work."""
        if self._groups.is_idle or (self._is_held and self._target is None):
            super().sleep()

    def close(self) -> None:
        """As RolloutWorker."""
        if not self._is_closed:
            self._runner.run(self._groups.close())
        super().close()


async def _use_threads(count: int) -> None:
    """In the thread of the loop, which begins with a number of its own."""
    torch.set_num_threads(count)
