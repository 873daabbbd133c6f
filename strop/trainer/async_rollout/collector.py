"""Samples that are made while the trainer works: rollout.max_staleness > 0.

Before each step as many prompts are begun as the bound allows (`Pace`), then the step waits for enough groups that have
ended. Generation in processes of its own goes on while the trainer works. Where it shares those of the trainer it has
its turns while a step waits, and what has not ended is held until the next one. In both cases unfinished samples go on
with the new weights, and say of each token which version sampled it.

With algorithm.filter_groups, a group that cannot teach is replaced as soon as it has ended (`Replacing`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from strop.controller import as_list
from strop.data.sampler import parse_visit_uid
from strop.protocol.trajectory import Prompt
from strop.rollout.types import Sampling
from strop.run import Fate, RunError, RunFolder
from strop.run.replay_schedule import StepSchedule, write_schedule
from strop.trainer.async_rollout.calls import begin, calls, ended
from strop.trainer.async_rollout.clocked import ClockedCollector
from strop.trainer.async_rollout.overlap import GroupColumns, describe_overlap
from strop.trainer.async_rollout.pacing import Pace
from strop.trainer.async_rollout.replacing import FILE as SHARE
from strop.trainer.async_rollout.replacing import Replacing
from strop.trainer.collecting import TooFewGroups, training_rows
from strop.trainer.config import Config
from strop.trainer.policy_sync import MAX_HEALS
from strop.trainer.records import StepRecord
from strop.trainer.rollout_batch import Experience
from strop.trainer.rounds.collector import FILTER, SURPLUS
from strop.trainer.setup import TrainingData
from strop.trainer.staleness_metrics import staleness_metrics
from strop.trainer.timing import Stages
from strop.trainer.worker_groups import Roles
from strop.utils.metrics import Metric
from strop.workers.async_rollout.begun import Begun, LeftOut, ages
from strop.workers.async_rollout.in_play import IN_PLAY, in_play_text, read_in_play
from strop.workers.async_rollout.kept import KeptGroup
from strop.workers.reports import EpisodeReport

LOOK_S = 0.03
"""Between looks at what has ended, in seconds per rollout worker: a look asks each of them."""
PROMPTS_AHEAD = Metric(
    "training/off_policy/prompts_ahead", "prompts", "begun and not in this step or an earlier one"
)
ROLLOUT_IDLE = Metric(
    "fully_async/rollouter/idle_ratio",
    "1",
    "share of the time since the step before in which nothing was played",
)
TRAINER_IDLE = Metric(
    "fully_async/trainer/idle_ratio", "1", "share of the same time in which the trainer waited for samples"
)


class AheadCollector(ClockedCollector):
    """Fills steps with samples that were begun up to rollout.max_staleness versions earlier."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        data: TrainingData,
        roles: Roles,
        sampling: Sampling,
        *,
        start_step: int,
        recorded: Mapping[int, StepSchedule] = MappingProxyType({}),
    ) -> None:
        """As RolloutCollector.

        Args:
            config, run, data, roles, sampling: of the run.
            start_step: steps of it that are done.
            recorded: by step, the schedule of a run that this one repeats.
        """
        super().__init__(config, run, data, roles, sampling)
        self._pace = Pace(
            groups_per_step=config.data.prompts_per_step,
            max_staleness=config.rollout.max_staleness,
            num_steps=data.num_steps,
        )
        self._begun: dict[str, Begun] = {}
        """By uid, in the order in which they were begun, those of no step yet."""
        self._arrived: dict[str, Experience] = {}
        """Those of them that have ended and that no step has looked at, first the one that ended first."""
        self._ended: dict[str, Experience] = {}
        """Those that a step has looked at, and that wait for this one or a later one, in that order."""
        self._ended_before: list[str] = []
        """Those that had ended when the run was interrupted, in that order, until they have arrived."""
        self._looked_before: list[str] = []
        """Those of them that were in `_ended`, until they are again."""
        self._start_step = start_step
        self._num_begun = start_step * config.data.prompts_per_step
        self._num_heals = 0
        self._recorded = recorded
        self._spans = {uid: spans for step in recorded.values() for uid, spans in step.spans.items()}
        self._busy_s, self._looked_s = 0.0, time.perf_counter()
        overlaps = config.rollout.overlap_log_probs
        self._columns = GroupColumns(config, roles, sampling) if overlaps else None
        self._is_apart = "rollout" in config.resources.apart
        self._replacing = Replacing(self._filtering, config.data.prompts_per_step)
        self._filters = self._filtering.enable

    def texts(self) -> dict[str, str]:
        """What was generated for the prompts of no step yet."""
        told = as_list(calls(self._roles).kept())
        kept = {uid: one for rank, _ in told for uid, one in rank.items()}
        uids = [*self._ended, *self._arrived, *(uid for _, own in told for uid in own)]
        shares = {SHARE: self._replacing.text()} if self._filters else {}
        in_play = in_play_text(self._versions, kept, uids, looked_at=self._ended)
        return {**super().texts(), **shares, IN_PLAY: in_play}

    def begin_again(self, checkpoint: Path | None) -> list[str]:
        """Go on with what was in play at a checkpoint: with the tokens that it holds, else from the beginning; lines
        that say so, and how far ahead generation may be.

        Raises:
            CheckpointError: its file is damaged.
        """
        super().begin_again(checkpoint)
        return [*_lead(self._config), *describe_overlap(self._config), *self._go_on(checkpoint)]

    def _go_on(self, checkpoint: Path | None) -> list[str]:
        """Begin what was in play."""
        if checkpoint is not None and self._filters:
            self._replacing.restore(checkpoint / SHARE)
            self._num_begun += self._replacing.num_unreplaced
        wanted = dict.fromkeys(name.rpartition("/")[0] for name in self._run.ledger.in_flight())
        if not wanted:
            return []
        in_play = {} if checkpoint is None else read_in_play(checkpoint / IN_PLAY)
        in_play = {uid: one for uid, one in in_play.items() if uid in wanted}
        uids = [*in_play, *(uid for uid in wanted if uid not in in_play)]
        prompts = [self._data.train.prompt(parse_visit_uid(uid)[1], uid) for uid in uids]
        for prompt in prompts:
            self._note(prompt, in_play[prompt.uid].version if prompt.uid in in_play else self._start_step)
        kept = {uid: one.kept for uid, one in in_play.items()}
        self._begin(prompts, kept)
        places = {uid: one.place for uid, one in in_play.items() if one.place is not None}
        self._ended_before = sorted(places, key=lambda uid: places[uid])
        self._looked_before = [uid for uid in self._ended_before if in_play[uid].is_looked_at]
        num_tokens = sum(len(note.token_ids) for one in kept.values() for note in one.requests.values())
        num_scores = sum(len(one.scores) for one in kept.values())
        had = f"{num_tokens} tokens and {num_scores} scores that they had"
        return [f"{len(uids)} prompts that were in play go on, with {had}"]

    def collect(self, step: int, stages: Stages, num_prompts: int | None = None) -> StepRecord:
        """As RolloutCollector.

        Raises:
            EpisodesFailed, RewardError: too many samples failed.
            TooFewGroups: filter_groups.at_limit is stop, and the limit was reached.
        """
        asked_s, self._num_heals = time.perf_counter(), 0
        left_out = LeftOut(num_before=self._replacing.num_unreplaced)
        looked_at: list[str] = []
        with self._roles.playing(self._config.samples_per_step):
            self._look_again(step)
            num_refused = self._open(step, left_out)
            while (chosen := self._pace.choose(step, self._versions, list(self._ended))) is None:
                if self._columns is not None:  # while others are played
                    self._columns.make_full(self._ended, stages)
                uid = self._next(step)
                looked_at.append(uid)
                self._sort_out(uid, self._arrived.pop(uid), left_out)
                num_refused += self._replace(step, left_out)
            self._discard_surplus(step, chosen, left_out)
            if self._recorded:  # what these weights sampled is sampled before others come
                self._arrived |= _by_prompt(ended(self._roles, [], 0))
            kept = {uid: self._ended.pop(uid) for uid in chosen}
            groups = [*kept.values(), *left_out.groups]
            episodes = Experience.concat(groups) if groups else ended(self._roles, [], 0)
            metrics = self._idle(asked_s)
        if self._lengths is not None:
            self._lengths.note(episodes.reports)
        self._check(episodes.reports)
        begun = [*(self._begun.pop(uid) for uid in chosen), *left_out.begun]
        told = as_list(calls(self._roles).forget([one.prompt.uid for one in begun]))
        spans = {uid: one for rank in told for uid, one in rank.items()}
        self._replacing.end_step()
        write_schedule(self._run.events, step, StepSchedule(ended=tuple(looked_at), spans=spans))
        self._tell_differing(step)
        taken = episodes.take([row for row, one in enumerate(episodes.reports) if one.uid in kept])
        metrics |= staleness_metrics(taken.reports, step - 1) | ages(begun[: len(chosen)])
        metrics |= self._give_up(step, left_out, num_trained=len(chosen))
        metrics |= {PROMPTS_AHEAD: float(len(self._begun)), **self._passed_over(num_refused)}
        if self._filters:
            metrics |= self._filter_metrics(left_out, episodes.reports)
        return self._clocked(
            StepRecord(
                step=step,
                prompts=tuple(one.prompt for one in begun),
                episodes=episodes,
                experience=training_rows(self._config, self._roles, taken, self._sampling)
                if self._columns is None or not kept
                else self._columns.take(kept, stages),
                dropped=left_out.causes,
                collection_metrics=metrics,
            )
        )

    @property
    def _versions(self) -> dict[str, int]:
        return {uid: one.version for uid, one in self._begun.items()}

    # ------------------------------------------------------------------ begin

    def _open(self, step: int, left_out: LeftOut) -> int:
        """Begin what a step begins; how many visits were passed over."""
        return self._fill(step, left_out)

    def _room(self, step: int, left_out: LeftOut) -> int:
        """How many prompts may be begun."""
        return self._pace.room(
            step,
            self._num_begun,
            num_in_play=len(self._begun) - len(self._ended),
            share=self._replacing.share,
            num_more=self._replacing.limit - left_out.num_replaced,
            num_beyond=self._replacing.num_beyond,
        )

    def _give_up(self, step: int, left_out: LeftOut, *, num_trained: int) -> dict[str, float]:
        """What a step that has its samples does with the others, and numbers of it: they go on."""
        size, num_free = self._pace.groups_per_step, left_out.num_places - left_out.num_replaced
        self._replacing.num_unreplaced = max(0, num_free - (size - num_trained))
        self._num_begun = step * size + len(self._begun) + self._replacing.num_unreplaced
        return {}

    def _fill(self, step: int, left_out: LeftOut) -> int:
        """Begin as many prompts as there is room for; how many visits were passed over."""
        replaced = min(left_out.num_places, self._replacing.limit)
        self._num_begun -= replaced - left_out.num_replaced
        left_out.num_replaced = replaced
        room = self._room(step, left_out)
        if not room:
            return 0
        drawn = self._issue(step, room)
        for prompt in drawn.prompts:
            self._note(prompt, step - 1)
        if drawn.prompts:
            self._begin(self._in_order(drawn.prompts))
        return len(drawn.refused)

    def _begin(self, prompts: Sequence[Prompt], kept: Mapping[str, KeptGroup] = MappingProxyType({})) -> None:
        count = self._config.rollout.samples_per_prompt
        begin(self._roles, prompts, count, self._sampling, kept, self._spans)

    def _in_order(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """The prompts in the order in which they are begun."""
        return prompts if self._first is None else self._first(prompts)

    def _note(self, prompt: Prompt, version: int) -> None:
        self._begun[prompt.uid] = Begun(prompt=prompt, version=version, at_s=time.perf_counter())
        self._num_begun += 1

    def _replace(self, step: int, left_out: LeftOut) -> int:
        """Begin others in the place of groups that were left out, up to the limit of a step; how many visits were
        passed over.

        Raises:
            TooFewGroups: it was reached, and is to end the run.
        """
        settings, size = self._filtering, self._pace.groups_per_step
        if len(left_out.groups) > self._replacing.limit and settings.at_limit == "stop":
            counts = Counter(left_out.causes.values())
            raise TooFewGroups(
                f"{len(left_out.groups)} groups could not teach before step {step} had its {size} "
                f"({', '.join(f'{n} {cause}' for cause, n in counts.items())}): use data of another difficulty, raise "
                f"algorithm.filter_groups.max_rounds, or set "
                f"algorithm.filter_groups.at_limit=train"
            )
        return self._fill(step, left_out)

    def _discard_surplus(self, step: int, chosen: Sequence[str], left_out: LeftOut) -> None:
        """Leave out the groups that would be too old after this step: more of them can teach than was expected."""
        versions = {uid: version for uid, version in self._versions.items() if uid not in chosen}
        surplus = self._pace.surplus(step, versions)
        begun = {uid: self._begun.pop(uid) for uid in surplus}
        for uid in surplus:
            if uid in self._ended:
                left_out.add(begun.pop(uid), self._ended.pop(uid), SURPLUS)
            else:
                self._arrived.pop(uid, None)
        if begun:
            left_out.num_given_up = len(begun)
            left_out.given_up_tokens = sum(as_list(calls(self._roles).drop(list(begun))))
            samples = range(self._config.rollout.samples_per_prompt)
            fates = {f"{uid}/{i}": Fate("filtered", SURPLUS) for uid in begun for i in samples}
            self._run.ledger.settle(step, fates)

    # ------------------------------------------------------------------ what has ended

    def _look_again(self, step: int) -> None:
        """Have those again that steps before an interruption had looked at."""
        while missing := [uid for uid in self._looked_before if uid not in self._arrived]:
            self._wait(step, missing, at_least=0)
        self._ended |= {uid: self._arrived.pop(uid) for uid in self._looked_before}
        self._looked_before = []

    def _next(self, step: int) -> str:
        """The group that the step looks at next: the one that ended first, or the one that was recorded there."""
        if step in self._recorded:
            for uid in self._recorded[step].ended:
                if uid in self._begun and uid not in self._ended:
                    while uid not in self._arrived:
                        self._wait(step, [uid], at_least=0)
                    return uid
            raise RunError(
                f"step {step} needs more groups than the run that is repeated had looked at: it left the schedule, "
                f"because samples came out otherwise"
            )
        while not self._arrived:
            due = [uid for uid in self._pace.due(step, self._versions) if uid not in self._ended]
            missing = self._pace.missing(step, self._versions, self._ended)
            ranks = self._roles.rollout.world_size
            is_looked_at_once = self._is_apart or self._columns is not None or self._filters
            if is_looked_at_once:  # a look costs nothing, or is for something
                self._wait(step, [], at_least=1)
            else:
                self._wait(step, due, at_least=max(1, math.ceil(missing / ranks)))
        return next(iter(self._arrived))

    def _wait(self, step: int, due: Sequence[str], *, at_least: int) -> None:
        """Wait for groups, all of `due` among them; what was lost with an engine is begun again.

        With several workers apart, none has to wait for another: whoever has nothing after a moment gives nothing.
        """
        assert len(self._begun) > len(self._ended), "what the step waits for is in play"
        ranks = self._roles.rollout.world_size
        within_s = max(0.1, LOOK_S * ranks) if self._is_apart and ranks > 1 else None
        arrived = _by_prompt(ended(self._roles, due, at_least, within_s))
        lost = [uid for uid, group in arrived.items() if any(one.engine_was_lost for one in group.reports)]
        if lost and self._num_heals < MAX_HEALS and self._roles.sync.heal():
            self._num_heals += 1
            self._begin([self._begun[uid].prompt for uid in lost])
            arrived = {uid: group for uid, group in arrived.items() if uid not in lost}
        first = [uid for uid in self._ended_before if uid in arrived]
        self._ended_before = [uid for uid in self._ended_before if uid not in first]
        self._arrived |= {
            uid: arrived[uid] for uid in [*first, *(uid for uid in arrived if uid not in first)]
        }

    def _tell_differing(self, step: int) -> None:
        """Record the samples that asked for something else than before an interruption, and were played afresh."""
        for name in (one for rank in as_list(calls(self._roles).differing_requests()) for one in rank):
            self._run.events.append("differing_request", step, request=name)

    def _sort_out(self, uid: str, group: Experience, left_out: LeftOut) -> None:
        """Keep a group for this step or a later one, or leave it out."""
        cause = self._filter(group.reports, at_most=1)[uid] if self._filters else ""
        self._replacing.note(teaches=not cause)
        if cause:
            left_out.add(self._begun.pop(uid), group, cause)
        else:
            self._ended[uid] = group

    def _filter_metrics(self, left_out: LeftOut, reports: Sequence[EpisodeReport]) -> dict[str, float]:
        """As `_counts`, with what was given up on its way; a round is as many groups as a step trains."""
        num_looked_at = len({report.uid for report in reports})
        metrics = self._counts(left_out.causes, reports, num_looked_at / self._pace.groups_per_step)
        num_samples = left_out.num_given_up * self._config.rollout.samples_per_prompt
        metrics[FILTER.of("discarded_surplus_samples")] += num_samples
        metrics[FILTER.of("discarded_surplus_tokens")] += left_out.given_up_tokens
        return metrics

    def _idle(self, asked_s: float) -> dict[str, float]:
        """Shares of the time since the last look, which ends now."""
        now, busy = time.perf_counter(), as_list(calls(self._roles).busy_s())
        passed = now - self._looked_s
        played = (sum(busy) / len(busy) - self._busy_s) / passed
        self._busy_s, self._looked_s = sum(busy) / len(busy), now
        worked = 0.0 if self._columns is None else self._columns.worked_s()
        waited = now - asked_s - worked
        return {ROLLOUT_IDLE: min(max(1 - played, 0.0), 1.0), TRAINER_IDLE: waited / passed}


def _lead(config: Config) -> list[str]:
    """How far generation may be ahead, and what makes up for it, in a line; none where it may not be."""
    bound, algorithm = config.rollout.max_staleness, config.algorithm
    if not bound:
        return []
    how = (
        "the loss takes its ratio to the policy that sampled (algorithm.old_log_probs=rollout)"
        if algorithm.old_log_probs == "rollout"
        else "algorithm.correction makes up for it"
    )
    versions = f"{math.ceil(bound)} version{'s' if bound > 1 else ''}"
    return [f"ahead: samples may be begun {versions} before the policy that learns from them; {how}"]


def _by_prompt(episodes: Experience) -> dict[str, Experience]:
    """The samples of each prompt, which are together; first the prompt that comes first."""
    rows: dict[str, list[int]] = {}
    for row, report in enumerate(episodes.reports):
        rows.setdefault(report.uid, []).append(row)
    return {uid: episodes.take(own) for uid, own in rows.items()}
