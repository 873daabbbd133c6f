"""The samples of a step: prompts drawn, played and scored.

Two ways lead to the groups of a step. In rounds, the prompts of a step are played at once and the step waits for all of
them; with algorithm.filter_groups further rounds follow until enough groups can teach. From groups in flight, the step
takes those that have completed, while others go on; `Pacing` says how many are started and which ones are taken
(rollout.max_staleness, rollout.over_issue).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from strop.protocol.trajectory import Prompt
from strop.rollout.types import Sampling
from strop.run import Fate, RunFolder
from strop.run.replay_schedule import StepSchedule, write_schedule
from strop.trainer.collecting import TooFewGroups, check_failures, training_rows
from strop.trainer.collectors.asynchronous import AsynchronousGroups
from strop.trainer.collectors.dynamic_sampling import FILTER, LOWEST_RATE, SURPLUS, GroupFilter
from strop.trainer.collectors.greedy_baselines import greedy_baselines
from strop.trainer.collectors.groups import DroppedGroups, ages
from strop.trainer.collectors.lengths import Lengths
from strop.trainer.collectors.next_prompts import NextPrompts
from strop.trainer.collectors.refill import FILE as SHARE
from strop.trainer.collectors.refill import Refill
from strop.trainer.collectors.replayed import RecordedOrder
from strop.trainer.config import Config
from strop.trainer.records import StepRecord
from strop.trainer.rollout_batch import RolloutBatch
from strop.trainer.worker_groups import WorkerGroups
from strop.utils.metrics import Metric
from strop.workers.generation_waits import generation_waits, sum_of_waits
from strop.workers.reports import EpisodeReport
from strop.workers.staleness_metrics import staleness_metrics

PROMPTS_AHEAD = Metric(
    "training/off_policy/prompts_ahead", "prompts", "begun and not in this step or an earlier one"
)


class Pacing(Protocol):
    """Policy of groups in flight: the number that is started, the ones that a step takes, and the fate of the
    others."""

    def restore(self, checkpoint: Path | None, groups: AsynchronousGroups) -> list[str]:
        """Go on with the groups of a checkpoint; sentences that say so."""
        ...

    def restart(self, step: int, groups: AsynchronousGroups) -> Sequence[Prompt]:
        """Prompts of earlier steps that this one plays afresh, entered in `groups`."""
        ...

    def capacity(self, step: int, groups: AsynchronousGroups, dropped: DroppedGroups) -> int:
        """Number of prompts that may be started now."""
        ...

    def must_train(self, step: int, versions: Mapping[str, int]) -> frozenset[str]:
        """Groups that this step has to train; arguments are those of `select`."""
        ...

    def missing(self, versions: Mapping[str, int], ready: Collection[str]) -> int:
        """Number of further groups that must be ready before `select` can have enough."""
        ...

    def select(self, step: int, versions: Mapping[str, int], ready: Sequence[str]) -> tuple[str, ...] | None:
        """The groups that the step trains, in the order of their start; None while it has to wait for more.

        Args:
            step: from 1.
            versions: by uid, in the order of their start, the policy version at that time, of every started group.
            ready: those that can be trained, in the order in which the step looked at them.
        """
        ...

    def too_old(self, step: int, versions: Mapping[str, int]) -> tuple[str, ...]:
        """Groups beside those of the step that no later step may train."""
        ...

    def end_step(
        self, step: int, groups: AsynchronousGroups, dropped: DroppedGroups, *, num_trained: int
    ) -> dict[str, float]:
        """The step has its groups; what becomes of the others, and metrics of it."""
        ...


class Collector:
    """Fills steps with samples."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        roles: WorkerGroups,
        sampling: Sampling,
        *,
        prompts: NextPrompts,
        group_filter: GroupFilter,
        lengths: Lengths | None = None,
        groups: AsynchronousGroups | None = None,
        pacing: Pacing | None = None,
        refill: Refill | None = None,
        recorded: RecordedOrder | None = None,
    ) -> None:
        """Args:
        config, run, roles, sampling: of the run.
        prompts: the next ones.
        group_filter: drops groups that cannot teach.
        lengths: of earlier answers, where long prompts are started first.
        groups: in flight over several steps; None: each step plays its own in rounds. With them come
        pacing: of these groups.
        refill: how many groups are started for those that are dropped.
        recorded: order of a run that is repeated.
        """
        self._config, self._run, self._roles, self._sampling = config, run, roles, sampling
        self._prompts, self._filter, self._lengths = prompts, group_filter, lengths
        self._groups, self._pacing, self._refill = groups, pacing, refill
        self._recorded = RecordedOrder({}) if recorded is None else recorded

    def collect(self, step: int) -> StepRecord:
        """The prompts of the next visits, played and scored; they count as consumed, with those that were passed over.

        Args:
            step: from 1.

        Raises:
            EpisodesFailed, RewardError: too many samples failed.
            TooFewGroups: filter_groups.at_limit is stop, and the limit was reached.
        """
        if self._groups is not None and self._pacing is not None and self._refill is not None:
            return self._collect_in_flight(step, self._groups, self._pacing, self._refill)
        return self._collect_rounds(step) if self._filter.is_on else self._play_round(step)

    @property
    def num_ahead(self) -> int:
        """Groups that were started for later steps."""
        return 0 if self._groups is None else len(self._groups.started)

    def state_files(self) -> dict[str, str]:
        """Files of a checkpoint, by name, without which something would be lost."""
        files = {} if self._lengths is None else {Lengths.FILE: self._lengths.text()}
        if self._refill is not None and self._filter.is_on:
            files[SHARE] = self._refill.state()
        return files if self._groups is None else {**files, **self._groups.state_files()}

    def restore(self, checkpoint: Path | None) -> list[str]:
        """Go on with the state of a checkpoint, and with the groups that were in flight; sentences that say so.

        Raises:
            CheckpointError: a file of it is damaged.
        """
        if self._lengths is not None and checkpoint is not None:
            self._lengths.restore(checkpoint / Lengths.FILE)
        if self._refill is not None and checkpoint is not None and self._filter.is_on:
            self._refill.restore(checkpoint / SHARE)
        if self._groups is None or self._pacing is None:
            return []
        return self._pacing.restore(checkpoint, self._groups)

    # ------------------------------------------------------------------ in rounds

    def _play_round(self, step: int, num_prompts: int | None = None) -> StepRecord:
        """The next prompts, played and scored at once; `num_prompts` in place of data.prompts_per_step."""
        config = self._config
        drawn = self._prompts.draw(step, num_prompts or config.data.prompts_per_step)
        prompts = drawn.prompts
        baselines = None
        if config.needs("reward_baselines"):
            baselines = greedy_baselines(config, self._roles, prompts, self._sampling)
        order = None if self._lengths is None else self._prompts.order
        episodes = self._roles.run_episodes(
            prompts, config.rollout.samples_per_prompt, self._sampling, order_by=order
        )
        check_failures(config, episodes.reports)
        batch = training_rows(config, self._roles, episodes, self._sampling)
        if baselines is not None and batch.reports:
            batch = batch.union(baselines(batch.reports), "reward_baselines")
        if self._lengths is not None:
            self._lengths.record(episodes.reports)
        return StepRecord(
            step=step,
            prompts=tuple(prompts),
            episodes=episodes,
            batch=batch,
            collection_metrics=self._prompts.metrics(len(drawn.skipped)),
            waits=generation_waits(episodes.reports),
        )

    def _collect_rounds(self, step: int) -> StepRecord:
        """Rounds until as many groups as data.prompts_per_step can teach, or max_rounds were played."""
        settings, num_wanted = self._filter.settings, self._config.data.prompts_per_step
        rounds: list[StepRecord] = []
        reasons: dict[str, str] = {}
        num_kept, rate = 0, 1.0
        while num_kept < num_wanted and len(rounds) < settings.max_rounds:
            if rounds and self._prompts.are_over:
                break
            num_missing = min(num_wanted, math.ceil((num_wanted - num_kept) / rate))
            rounds.append(self._play_round(step, settings.prompts_per_round or num_missing))
            reasons |= self._filter.reasons(rounds[-1].episodes.reports, at_most=num_wanted - num_kept)
            num_kept = sum(not reason for reason in reasons.values())
            rate = max(num_kept / sum(len(played.prompts) for played in rounds), LOWEST_RATE)
        dropped = {uid: reason for uid, reason in reasons.items() if reason}
        if num_kept < num_wanted and settings.at_limit == "stop" and not self._prompts.are_over:
            raise TooFewGroups(
                f"only {num_kept} of {num_wanted} groups could teach after {len(rounds)} rounds "
                f"({_counts(dropped)}): use data of another difficulty, raise algorithm.filter_groups.max_rounds, or "
                f"set algorithm.filter_groups.at_limit=train"
            )
        batch = RolloutBatch.concat([played.batch for played in rounds])
        if dropped:
            rows = [row for row, report in enumerate(batch.reports) if report.uid not in dropped]
            batch = batch.take(rows)
        reports = [report for played in rounds for report in played.episodes.reports]
        skipped = {
            name: sum(played.collection_metrics[name] for played in rounds)
            for name in rounds[0].collection_metrics
        }
        return StepRecord(
            step=step,
            prompts=tuple(prompt for played in rounds for prompt in played.prompts),
            episodes=RolloutBatch.concat([played.episodes for played in rounds]),
            batch=batch,
            dropped=dropped,
            collection_metrics={**self._filter.metrics(dropped, reports, len(rounds)), **skipped},
            waits=sum_of_waits(played.waits for played in rounds),
        )

    # ------------------------------------------------------------------ from groups in flight

    def _collect_in_flight(
        self, step: int, groups: AsynchronousGroups, pacing: Pacing, refill: Refill
    ) -> StepRecord:
        """Start prompts as `pacing` allows, wait until it finds enough groups ready, and leave the others to it."""
        asked_s = time.perf_counter()
        dropped = DroppedGroups(num_before=refill.num_unfilled)
        looked_at: list[str] = []
        groups.begin_step()
        with self._roles.generating(self._config.samples_per_step):
            groups.complete_ready()
            if restarted := pacing.restart(step, groups):
                groups.start(self._prompts.order(restarted))
            num_skipped = self._start_prompts(step, groups, pacing, refill, dropped)
            while (chosen := pacing.select(step, groups.versions, list(groups.ready))) is None:
                uid = self._next_completed(step, groups, pacing)
                looked_at.append(uid)
                self._look_at(uid, groups, refill, dropped)
                self._check_limit(step, refill, dropped)
                num_skipped += self._start_prompts(step, groups, pacing, refill, dropped)
            self._drop_too_old(step, groups, pacing, chosen, dropped)
            if self._recorded:  # what these weights sampled is sampled before others come
                groups.take_completed()
            selected = {uid: groups.ready.pop(uid) for uid in chosen}
            parts = [*selected.values(), *dropped.episodes]
            episodes = RolloutBatch.concat(parts) if parts else groups.empty_batch()
            metrics = groups.idle_metrics(time.perf_counter() - asked_s)
        if self._lengths is not None:
            self._lengths.record(episodes.reports)
        check_failures(self._config, episodes.reports)
        started = [*(groups.started.pop(uid) for uid in chosen), *dropped.started]
        spans = groups.forget([group.prompt.uid for group in started])
        refill.end_step()
        write_schedule(self._run.events, step, StepSchedule(ended=tuple(looked_at), spans=spans))
        for (
            request
        ) in groups.differing_requests():  # they asked for something else than before an interruption
            self._run.events.append("differing_request", step, request=request)
        trained = episodes.take(
            [row for row, report in enumerate(episodes.reports) if report.uid in selected]
        )
        metrics |= staleness_metrics(trained.reports, step - 1) | ages(started[: len(chosen)])
        metrics |= pacing.end_step(step, groups, dropped, num_trained=len(chosen))
        metrics |= {PROMPTS_AHEAD: float(len(groups.started)), **self._prompts.metrics(num_skipped)}
        if self._filter.is_on:
            metrics |= self._filter_metrics(dropped, episodes.reports)
        return StepRecord(
            step=step,
            prompts=tuple(group.prompt for group in started),
            episodes=episodes,
            batch=training_rows(self._config, self._roles, trained, self._sampling),
            dropped=dropped.reasons,
            collection_metrics=metrics,
        )

    def _start_prompts(
        self, step: int, groups: AsynchronousGroups, pacing: Pacing, refill: Refill, dropped: DroppedGroups
    ) -> int:
        """Start as many prompts as there is room for; how many visits were passed over."""
        num_refilled = min(dropped.num_places, refill.limit)
        groups.num_started -= num_refilled - dropped.num_refilled
        dropped.num_refilled = num_refilled
        capacity = pacing.capacity(step, groups, dropped)
        if not capacity:
            return 0
        drawn = self._prompts.draw(step, capacity)
        for prompt in drawn.prompts:
            groups.add(prompt, step - 1)
        if drawn.prompts:
            groups.start(self._prompts.order(drawn.prompts))
        return len(drawn.skipped)

    def _next_completed(self, step: int, groups: AsynchronousGroups, pacing: Pacing) -> str:
        """The group that the step looks at next: the one that ended first, or the one that was recorded there."""
        if self._recorded.has(step):
            uid = self._recorded.next(step, groups.started.keys() - groups.ready.keys())
            while uid not in groups.completed:
                groups.wait([uid], at_least=0)
            return uid
        while not groups.completed:
            if groups.is_apart or self._filter.is_on:
                groups.wait([], at_least=1)  # a look costs nothing, or is for something
            else:
                due = [uid for uid in pacing.must_train(step, groups.versions) if uid not in groups.ready]
                num_missing = pacing.missing(groups.versions, groups.ready)
                num_ranks = self._roles.rollout.world_size
                groups.wait(due, at_least=max(1, math.ceil(num_missing / num_ranks)))
        return next(iter(groups.completed))

    def _look_at(self, uid: str, groups: AsynchronousGroups, refill: Refill, dropped: DroppedGroups) -> None:
        """Make a completed group ready for this step or a later one, or drop it."""
        episodes = groups.completed.pop(uid)
        reason = self._filter.reasons(episodes.reports, at_most=1)[uid] if self._filter.is_on else ""
        refill.record(teaches=not reason)
        if reason:
            dropped.add(groups.started.pop(uid), episodes, reason)
        else:
            groups.ready[uid] = episodes

    def _check_limit(self, step: int, refill: Refill, dropped: DroppedGroups) -> None:
        """Refuse to drop more groups before a step than its limit, where that is to end the run."""
        num_dropped = len(dropped.episodes)
        if num_dropped > refill.limit and self._filter.settings.at_limit == "stop":
            size = self._config.data.prompts_per_step
            raise TooFewGroups(
                f"{num_dropped} groups could not teach before step {step} had its {size} "
                f"({_counts(dropped.reasons)}): use data of another difficulty, raise "
                f"algorithm.filter_groups.max_rounds, or set algorithm.filter_groups.at_limit=train"
            )

    def _drop_too_old(
        self,
        step: int,
        groups: AsynchronousGroups,
        pacing: Pacing,
        chosen: Sequence[str],
        dropped: DroppedGroups,
    ) -> None:
        """Drop the groups that would be too old after this step: more of them can teach than was expected."""
        versions = {uid: version for uid, version in groups.versions.items() if uid not in chosen}
        too_old = {uid: groups.started.pop(uid) for uid in pacing.too_old(step, versions)}
        given_up: list[str] = []
        for uid, group in too_old.items():
            if uid in groups.ready:
                dropped.add(group, groups.ready.pop(uid), SURPLUS)
            else:
                groups.completed.pop(uid, None)
                given_up.append(uid)
        if given_up:
            dropped.num_given_up = len(given_up)
            dropped.given_up_tokens = groups.give_up(given_up)
            samples = range(self._config.rollout.samples_per_prompt)
            fates = {f"{uid}/{i}": Fate("filtered", SURPLUS) for uid in given_up for i in samples}
            self._run.ledger.settle(step, fates)

    def _filter_metrics(self, dropped: DroppedGroups, reports: Sequence[EpisodeReport]) -> dict[str, float]:
        """Metrics of the filter, with what was given up in flight; a round is as many groups as a step trains."""
        num_looked_at = len({report.uid for report in reports})
        num_rounds = num_looked_at / self._config.data.prompts_per_step
        metrics = self._filter.metrics(dropped.reasons, reports, num_rounds)
        num_samples = dropped.num_given_up * self._config.rollout.samples_per_prompt
        metrics[FILTER.of("discarded_surplus_samples")] += num_samples
        metrics[FILTER.of("discarded_surplus_tokens")] += dropped.given_up_tokens
        return metrics


def _counts(reasons: Mapping[str, str]) -> str:
    """The reasons with their counts, in a line."""
    return ", ".join(f"{count} {reason}" for reason, count in Counter(reasons.values()).items())
