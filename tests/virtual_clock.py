"""A clock of engine steps for tests: the order in which samples of an asynchronous run end follows from the seed.

By the clock on the wall, the order depends on how fast scorers, tools and the machine are. By this one an engine takes
a step when every episode waits for a token, and whatever happened in between is entered in the order of its names.
Scoring and tools take no time but what `Delays` let pass. For runs in one process with the native engine.

    with virtual_clock(Delays(seed=0, latencies=Distribution(median=3.0, sigma=1.0))):
        train_in(folder, config)

`python -m virtual_clock train ...` is the command line with this clock, for tests that kill a process.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from strop.cli.main import main
from strop.controller import Dispatch, as_list, register
from strop.data.visit_ids import is_visit
from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards.outcome import Outcome
from strop.rollout.client import GenerateClient
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import OnToken, Sampling, TokenOutput
from strop.trainer import role_specs
from strop.trainer.loop import Trainer
from strop.trainer.records import StepRecord
from strop.trainer.timing import Stages
from strop.utils.rng import random_key, uniforms
from strop.workers.async_rollout import in_play
from strop.workers.async_rollout.generation_cache import GenerationCache
from strop.workers.async_rollout.in_flight import Group, GroupsInFlight
from strop.workers.async_rollout.in_play import GroupState
from strop.workers.async_rollout.saved_group import SavedGroup
from strop.workers.async_rollout.score_cache import ScoreCache
from strop.workers.async_rollout.worker import AsyncRolloutWorker
from strop.workers.episode_scores import Scorers
from strop.workers.episodes import Episode
from strop.workers.rollout import RolloutWorker

CLOCK_STEPS = "test/clock_steps"
"""Metric: engine steps since the step before."""


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
        self.is_held = False
        """The engine takes no step, and no time passes."""
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
        elif self.is_held:
            return
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


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Distribution of numbers of engine steps."""

    recorded: tuple[float, ...] = ()
    """Sorted; each as likely. Empty: log-normal."""
    median: float = 0.0
    sigma: float = 0.0
    """Standard deviation of the logarithm."""

    def at(self, share: float) -> int:
        """The quantile of a share between 0 and 1."""
        if self.recorded:
            return round(self.recorded[min(int(share * len(self.recorded)), len(self.recorded) - 1)])
        return round(math.exp(math.log(self.median) + self.sigma * NormalDist().inv_cdf(share)))


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Engine steps by which a sample ends later than its tokens say."""

    seed: int
    lengths: Distribution | None = None
    """Of the tokens that answers take the time of, where that is more than they have."""
    latencies: Distribution | None = None
    """Of the time between an answer's end and its score."""

    def steps_after(self, uid: str, sample_index: int, num_tokens: int) -> int:
        """Engine steps from a sample's last token to its end."""
        length = self._drawn(self.lengths, "clock lengths", uid, sample_index)
        return max(length - num_tokens, 0) + self._drawn(self.latencies, "clock latencies", uid, sample_index)

    def _drawn(self, among: Distribution | None, purpose: str, uid: str, sample_index: int) -> int:
        if among is None:
            return 0
        key = random_key(self.seed, purpose, uid, sample_index)
        return among.at(float(uniforms(np.array([key], dtype=np.uint64), np.array([0]))[0]))


NO_DELAYS = Delays(seed=0)
LONG_TAIL = Delays(
    seed=0, lengths=Distribution(median=6.0, sigma=1.0), latencies=Distribution(median=3.0, sigma=1.0)
)


class _Gated(asyncio.Event):
    """An engine's event that it runs; it waits at the gate of the clock before each step."""

    def __init__(self, engine: NativeEngine, clock: StepClock) -> None:
        super().__init__()
        self._engine, self._clock, self._is_at_gate = engine, clock, False
        super().set()

    def set(self) -> None:
        super().set()
        self._clock.is_held = False
        self._clock.look()

    def clear(self) -> None:
        super().clear()
        self._clock.is_held = True

    def is_set(self) -> bool:
        return super().is_set() and not self._is_at_gate

    async def wait(self) -> Any:
        await super().wait()
        self._is_at_gate = True
        try:
            await self._clock.gate()
        finally:
            self._is_at_gate = False
        batch = self._engine._batch
        batch.waiting = deque(sorted(batch.waiting, key=lambda request: request.request_id))


class _ClockedClient:
    """A client whose requests enter by the clock."""

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


@dataclass(frozen=True, kw_only=True)
class _DelayedGroup(SavedGroup):
    """A group of a checkpoint, with the delays of its samples."""

    steps_left: Mapping[str, int] = field(default_factory=dict)
    """By number of the sample, engine steps until it ends, of those that have all their tokens."""


class _ClockedScores(ScoreCache):
    """Scores that let the delay of their sample pass."""

    worker: ClockedWorker

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, solution_str: str, *, in_group: bool = False
    ) -> Outcome:
        outcome = await super().score(prompt, trajectory, solution_str, in_group=in_group)
        await self.worker.pass_time(prompt.uid, trajectory.sample_index, len(trajectory.response_ids))
        return outcome


class _ClockedGroups(GroupsInFlight):
    """Groups in flight whose end the clock decides."""

    def __init__(self, worker: ClockedWorker, on_episode: Callable[[Episode], None]) -> None:
        super().__init__(worker._episode_runner, self._count_down)
        self._clock, self._report_episode = worker.clock, on_episode
        self._clock.on_settled = self._settle
        self._num_left: dict[str, int] = {}
        self._unsettled: dict[str, asyncio.Task[Group]] = {}
        self._wanted: tuple[frozenset[str], int] | None = None

    async def start(self) -> None:
        self._num_left |= {prompt.uid: count for prompt, count, _ in self._pending}
        self._clock.begin(sum(count for _, count, _ in self._pending))
        await super().start()

    def _count_down(self, episode: Episode) -> None:
        self._report_episode(episode)
        self._num_left[episode.prompt.uid] -= 1
        if self._num_left[episode.prompt.uid]:
            self._clock.end()  # the last one ends with its group

    def _on_done(self, uid: str, task: asyncio.Task[Group]) -> None:
        if task.cancelled() or task.exception():
            super()._on_done(uid, task)
        else:
            self._unsettled[uid] = task  # it counts once all that ends at this moment has ended
            del self._num_left[uid]
            self._clock.end()

    def _settle(self) -> bool:
        for uid in [uid for uid in self._in_flight if uid in self._unsettled]:
            super()._on_done(uid, self._unsettled[uid])
        self._unsettled.clear()
        return self._wanted is not None and self.have_ended(*self._wanted)

    async def take(self, due: frozenset[str], at_least: int, within_s: float | None = None) -> list[Group]:
        await self.start()
        self._wanted = due, at_least
        self._clock.look()
        try:
            return await super().take(due, at_least, within_s)
        finally:
            self._wanted = None

    async def drop(self, uids: Collection[str]) -> None:
        await super().drop(uids)
        for uid in uids:
            self._num_left.pop(uid, None)


class ClockedWorker(AsyncRolloutWorker):
    """An AsyncRolloutWorker whose samples end by the clock."""

    delays = NO_DELAYS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clock = StepClock()
        self._due: dict[str, dict[str, int]] = {}  # by uid and sample number, when it ends by the clock
        self._delays_play = False
        super().__init__(*args, **kwargs)
        self._groups: GroupsInFlight = _ClockedGroups(self, self._on_sample)

    def _make_engines(self, model: Any) -> Any:
        media = super()._make_engines(model)
        engine: Any = self._engines.first.engine
        assert isinstance(engine, NativeEngine), "the clock counts steps of the native engine"
        engine._running = _Gated(engine, self.clock)
        return media

    def _clients(self) -> tuple[GenerateClient, Scorers]:
        client, scorers = super()._clients()
        assert isinstance(client, GenerationCache)
        client._client = _ClockedClient(client._client, self.clock)
        assert isinstance(scorers, ScoreCache)
        scores = _ClockedScores(scorers._pool)
        scores.worker, self._scores = self, scores
        return client, scores

    def _on_sample(self, episode: Episode) -> None:
        RolloutWorker._on_episode(self, episode)

    def _on_episode(self, episode: Episode) -> None:
        super()._on_episode(episode)
        self.clock.end()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def run_episodes(self, prompts: DataProto, samples_per_prompt: int, sampling: Sampling) -> DataProto:
        uids = [prompt.uid for prompt in prompts.non_tensor_batch["prompt"]]
        self.clock.begin(len(uids) * samples_per_prompt)
        self._delays_play = not self._rollout.is_streamed and all(map(is_visit, uids))
        played = super().run_episodes(prompts, samples_per_prompt, sampling)
        self._forget_delays(uids)
        return played

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def start_groups(self, prompts: DataProto, samples_per_prompt: int, sampling: Sampling) -> None:
        columns = prompts.non_tensor_batch
        for prompt, saved in zip(columns["prompt"], columns["saved"], strict=True):
            left = saved.steps_left if isinstance(saved, _DelayedGroup) else {}
            self._due[prompt.uid] = {number: self.clock.now + steps for number, steps in left.items()}
        super().start_groups(prompts, samples_per_prompt, sampling)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def forget(self, uids: Sequence[str]) -> dict[str, Any]:
        self._forget_delays(uids)
        return super().forget(uids)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def clock_steps(self) -> int:
        return self.clock.now

    def _forget_delays(self, uids: Sequence[str]) -> None:
        for uid in uids:
            self._due.pop(uid, None)

    async def _saved_groups(self) -> tuple[dict[str, SavedGroup], list[str]]:
        groups, ended = await super()._saved_groups()
        now = self.clock.now
        for uid, group in groups.items():
            left = {number: max(due - now, 0) for number, due in self._due.get(uid, {}).items()}
            groups[uid] = _DelayedGroup(requests=group.requests, scores=group.scores, steps_left=left)
        return groups, ended

    async def pass_time(self, uid: str, sample_index: int, num_tokens: int) -> None:
        """Wait until the sample ends by the clock."""
        if uid not in self._due and not self._delays_play:
            return
        own, number = self._due.setdefault(uid, {}), str(sample_index)
        if number not in own:
            own[number] = self.clock.now + self.delays.steps_after(uid, sample_index, num_tokens)
        await self.clock.sleep(f"{uid}/{number}", own[number] - self.clock.now)


@contextmanager
def virtual_clock(delays: Delays = NO_DELAYS) -> Iterator[None]:
    """Runs that begin meanwhile, in this process, go by the clock."""

    class Worker(ClockedWorker):
        pass

    Worker.delays = delays
    read, run_step = in_play._read, Trainer.step
    seen: dict[Trainer, int] = {}

    def read_delays(line: str) -> GroupState:
        entry = read(line)
        kept, left = entry.kept, json.loads(line).get("steps_left", {})
        return replace(entry, kept=_DelayedGroup(requests=kept.requests, scores=kept.scores, steps_left=left))

    def step(self: Trainer, number: int, stages: Stages) -> StepRecord:
        record = run_step(self, number, stages)
        now = max(as_list(self.roles.rollout.call.clock_steps()))  # type: ignore[attr-defined]
        passed, seen[self] = now - seen.get(self, 0), now
        metrics = {**record.collection_metrics, CLOCK_STEPS: float(passed)}
        return replace(record, collection_metrics=metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(role_specs, "RolloutWorker", Worker)
        patch.setattr(role_specs, "AsyncRolloutWorker", Worker)
        patch.setattr(in_play, "_read", read_delays)
        patch.setattr(Trainer, "step", step)
        yield


if __name__ == "__main__":
    with virtual_clock(LONG_TAIL):
        sys.exit(main())
