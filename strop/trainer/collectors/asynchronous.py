"""Groups that rollout workers play over several steps: the controller's table of them, and what a checkpoint keeps.

A group is in flight until its samples have all ended; then it is completed. One that a step has looked at, and that it
or a later one trains, is ready. Generation in processes of its own goes on while the trainer works. Where it shares
those of the trainer it has its turns while a step waits, and what has not ended is held until the next one. In both
cases unfinished samples go on with the new weights, and say of each token which version sampled it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from strop.controller import WorkerLost, as_list
from strop.data.visit_ids import parse_visit_uid
from strop.protocol.trajectory import Prompt
from strop.rollout.types import Sampling
from strop.run import RunFolder
from strop.run.replay_schedule import Spans
from strop.trainer.collectors.calls import calls, start_groups, take_completed
from strop.trainer.collectors.groups import InFlightGroup
from strop.trainer.config import Config
from strop.trainer.policy_sync import MAX_RECOVERIES
from strop.trainer.rollout_batch import RolloutBatch
from strop.trainer.setup import TrainingData
from strop.trainer.worker_groups import WorkerGroups
from strop.utils.metrics import Metric
from strop.workers.async_rollout.in_play import IN_PLAY, in_play_text, read_in_play
from strop.workers.async_rollout.saved_group import SavedGroup

LOOK_S = 0.03
"""Between looks at what has ended, in seconds per rollout worker: a look asks each of them."""
ROLLOUT_IDLE = Metric(
    "fully_async/rollouter/idle_ratio",
    "1",
    "share of the time since the step before in which nothing was played",
)
TRAINER_IDLE = Metric(
    "fully_async/trainer/idle_ratio", "1", "share of the same time in which the trainer waited for samples"
)


class AsynchronousGroups:
    """Table of the groups of later steps in the rollout workers."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        data: TrainingData,
        roles: WorkerGroups,
        sampling: Sampling,
        *,
        start_step: int,
        spans: Mapping[str, Spans] = MappingProxyType({}),
    ) -> None:
        """Args:
        config, run, data, roles, sampling: of the run.
        start_step: steps of it that are done.
        spans: by uid, which versions have to sample what, where a run is repeated.
        """
        self._config, self._run, self._data, self._roles = config, run, data, roles
        self._sampling, self._start_step, self._spans = sampling, start_step, spans
        self.started: dict[str, InFlightGroup] = {}
        """Groups of no step yet (in flight, completed or ready) by uid, in the order of their start."""
        self.completed: dict[str, RolloutBatch] = {}
        """Completed groups that no step has looked at, first the one that ended first."""
        self.ready: dict[str, RolloutBatch] = {}
        """Groups that a step has looked at, and that wait for this one or a later one, in that order."""
        self.num_started = start_step * config.data.prompts_per_step
        """Groups of the run that were started and not given up, trained ones included."""
        self.is_apart = "rollout" in config.resources.apart
        """Generation has processes of its own."""
        self._completed_before: list[
            str
        ] = []  # before an interruption, in order, until they are completed again
        self._ready_before: list[str] = []  # those of them that were ready
        self._num_recoveries = 0
        self._num_lost = 0 if roles.workers is None else roles.workers.num_lost
        self._busy_s, self._looked_s = 0.0, time.perf_counter()

    @property
    def versions(self) -> dict[str, int]:
        """Policy version at the start of each group, by uid, in that order."""
        return {uid: group.version for uid, group in self.started.items()}

    # ------------------------------------------------------------------ checkpoints

    def state_files(self) -> dict[str, str]:
        """Files of a checkpoint, by name."""
        by_rank = as_list(calls(self._roles).saved_groups())
        saved = {uid: group for groups, _ in by_rank for uid, group in groups.items()}
        completed = [*self.ready, *self.completed, *(uid for _, uids in by_rank for uid in uids)]
        return {IN_PLAY: in_play_text(self.versions, saved, completed, looked_at=self.ready)}

    def restore(self, checkpoint: Path | None) -> list[str]:
        """Start the groups that were in flight at a checkpoint: with the tokens that it holds, else from the beginning;
        sentences that say so.

        Raises:
            CheckpointError: its file is damaged.
        """
        uids = self.uids_in_ledger()
        if not uids:
            return []
        saved = {} if checkpoint is None else read_in_play(checkpoint / IN_PLAY)
        saved = {uid: group for uid, group in saved.items() if uid in uids}
        uids = [*saved, *(uid for uid in uids if uid not in saved)]
        prompts = [self._data.train.prompt(parse_visit_uid(uid)[1], uid) for uid in uids]
        for prompt in prompts:
            self.add(prompt, saved[prompt.uid].version if prompt.uid in saved else self._start_step)
        states = {uid: group.kept for uid, group in saved.items()}
        self.start(prompts, states)
        places = {uid: group.place for uid, group in saved.items() if group.place is not None}
        self._completed_before = sorted(places, key=lambda uid: places[uid])
        self._ready_before = [uid for uid in self._completed_before if saved[uid].is_looked_at]
        num_tokens = sum(len(note.token_ids) for group in states.values() for note in group.requests.values())
        num_scores = sum(len(group.scores) for group in states.values())
        had = f"{num_tokens} tokens and {num_scores} scores that they had"
        return [f"{len(uids)} prompts that were in play go on, with {had}"]

    def uids_in_ledger(self) -> list[str]:
        """Prompts that were issued and have no fate, in that order."""
        return list(dict.fromkeys(name.rpartition("/")[0] for name in self._run.ledger.in_flight()))

    def complete_ready(self) -> None:
        """Wait for the groups that were ready before an interruption."""
        while missing := [uid for uid in self._ready_before if uid not in self.completed]:
            self.wait(missing, at_least=0)
        self.ready |= {uid: self.completed.pop(uid) for uid in self._ready_before}
        self._ready_before = []

    # ------------------------------------------------------------------ in flight

    def add(self, prompt: Prompt, version: int) -> None:
        """Enter the group of a prompt, which `start` starts."""
        self.started[prompt.uid] = InFlightGroup(
            prompt=prompt, version=version, started_s=time.perf_counter()
        )
        self.num_started += 1

    def start(
        self, prompts: Sequence[Prompt], saved: Mapping[str, SavedGroup] = MappingProxyType({})
    ) -> None:
        """Start these prompts in the workers; `saved` has the state of some before an interruption, by uid."""
        count = self._config.rollout.samples_per_prompt
        try:
            start_groups(self._roles, prompts, count, self._sampling, saved, self._spans)
        except WorkerLost:
            self._play_lost_again()

    def _play_lost_again(self) -> None:
        """Start the groups that were in play in rollout workers that are lost, from their beginning.

        Raises:
            WorkerLost: workers were lost too often in this step.
        """
        if (workers := self._roles.workers) is None:
            return
        workers.note_losses()
        while workers.num_lost != self._num_lost:
            self._num_lost = workers.num_lost
            by_rank = as_list(calls(self._roles).uids_in_play())
            there = {uid for uids in by_rank for uid in uids} | self.ready.keys() | self.completed.keys()
            lost = [group.prompt for uid, group in self.started.items() if uid not in there]
            if lost:
                self.start(lost)
            workers.note_losses()

    def begin_step(self) -> None:
        """A step begins to wait for groups: engines that are lost are started again a few times in each."""
        self._num_recoveries = 0

    def wait(self, due: Sequence[str], *, at_least: int) -> None:
        """Wait for groups, all of `due` among them; what was lost with an engine is started again.

        With several workers apart, none has to wait for another: whoever has nothing after a moment gives nothing.
        """
        assert len(self.started) > len(self.ready), "what the step waits for is in flight"
        self._play_lost_again()
        num_ranks = self._roles.rollout.world_size
        within_s = max(0.1, LOOK_S * num_ranks) if self.is_apart and num_ranks > 1 else None
        arrived = by_prompt(take_completed(self._roles, due, at_least, within_s))
        lost = [
            uid for uid, group in arrived.items() if any(report.engine_was_lost for report in group.reports)
        ]
        if lost and self._num_recoveries < MAX_RECOVERIES and self._roles.sync.recover():
            self._num_recoveries += 1
            self.start([self.started[uid].prompt for uid in lost])
            arrived = {uid: group for uid, group in arrived.items() if uid not in lost}
        first = [uid for uid in self._completed_before if uid in arrived]
        self._completed_before = [uid for uid in self._completed_before if uid not in first]
        self.completed |= {
            uid: arrived[uid] for uid in [*first, *(uid for uid in arrived if uid not in first)]
        }

    def empty_batch(self) -> RolloutBatch:
        """A batch without samples, in the form in which workers give them."""
        return self.take_completed().take([])

    def take_completed(self) -> RolloutBatch:
        """Take the groups that have ended, without waiting; their rows."""
        fetched = take_completed(self._roles, [], 0)
        self.completed |= by_prompt(fetched)
        return fetched

    def forget(self, uids: Sequence[str]) -> dict[str, Spans]:
        """The workers forget groups that a step has trained or dropped; by uid, which versions sampled them."""
        by_rank = as_list(calls(self._roles).forget(list(uids)))
        return {uid: spans for rank in by_rank for uid, spans in rank.items()}

    def give_up(self, uids: Collection[str]) -> int:
        """The workers stop playing these; how many tokens they had."""
        return int(sum(as_list(calls(self._roles).drop(list(uids))))) if uids else 0

    def differing_requests(self) -> list[str]:
        """Requests that were others than before an interruption, since the call before this one."""
        by_rank = as_list(calls(self._roles).differing_requests())
        return [request for rank in by_rank for request in rank]

    def idle_metrics(self, waited_s: float) -> dict[str, float]:
        """ROLLOUT_IDLE and TRAINER_IDLE since the call before this one.

        Args:
            waited_s: seconds in which the trainer waited for samples.
        """
        now, by_rank = time.perf_counter(), as_list(calls(self._roles).busy_s())
        busy_s = sum(by_rank) / len(by_rank)
        passed = now - self._looked_s
        idle = 1 - (busy_s - self._busy_s) / passed
        self._busy_s, self._looked_s = busy_s, now
        return {ROLLOUT_IDLE: min(max(idle, 0.0), 1.0), TRAINER_IDLE: waited_s / passed}


def by_prompt(episodes: RolloutBatch) -> dict[str, RolloutBatch]:
    """The samples of each prompt, which are together; first the prompt that comes first."""
    rows: dict[str, list[int]] = {}
    for row, report in enumerate(episodes.reports):
        rows.setdefault(report.uid, []).append(row)
    return {uid: episodes.take(numbers) for uid, numbers in rows.items()}
