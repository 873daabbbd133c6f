"""Generation as a role: agents, engine and scorers in one process, which plays its share of the prompts.

Prompts go in, episodes come out; the controller reads their reports and hands a reference to the rest on, so that it
never handles tokens. The policy is either that of a training role in the same process, whose own parameters are used
(no copy), or a copy of the worker's own that `receive_weights` keeps up to date.

Concurrency: the worker is called from one thread. Inside `play` an asyncio loop, kept over all calls, runs
the agents, the engine and the reward pool; its waits have the deadlines rollout.timeout_s and
reward.timeout_s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from strop.agents.setup import AgentSetup
from strop.algorithms.extensions import load_extensions
from strop.base.call_loop import CallRunner, ThreadRunner
from strop.controller import Dispatch, Worker, register
from strop.data.sampler import is_visit
from strop.engines.config import ModelConfig
from strop.engines.media import MediaReader
from strop.engines.model import load_tokenizer
from strop.engines.training import TrainEngine
from strop.protocol import DataProto
from strop.rewards import RewardConfig, RewardPool
from strop.rollout.client import GenerateClient
from strop.rollout.config import RolloutConfig
from strop.rollout.sync.probe import Probe
from strop.rollout.sync.transfer import ReceivingEngine, weight_transfer
from strop.rollout.sync.types import Endpoint, SyncReport
from strop.rollout.types import Sampling
from strop.run import SampleStore
from strop.run.schedule import Spans
from strop.trajectory import Prompt
from strop.workers.episodes import Episode
from strop.workers.generation import Generation, Place
from strop.workers.in_flight import GroupsInFlight
from strop.workers.journal import Journal
from strop.workers.kept import KeptGroup
from strop.workers.models import TrainedWorker
from strop.workers.played_rows import saved_rows, training_rows
from strop.workers.player import Player, make_player
from strop.workers.playing import Playing
from strop.workers.recorded_schedule import RecordedSchedule
from strop.workers.recording import open_recording
from strop.workers.reports import report_of
from strop.workers.score_journal import ScoreJournal
from strop.workers.serving import make_serving
from strop.workers.step_clock import ClockedClient, StepClock
from strop.workers.tally import Tally


class RolloutWorker(Worker):
    """Plays prompts, and makes training rows and saved samples of episodes. It remembers none of it."""

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, reward: RewardConfig, playing: Playing
    ) -> None:
        """Load tokenizer and policy.

        Args:
            model: the folder of the policy.
            rollout, reward: how to generate and to score.
            playing: all else.
        """
        super().__init__()
        load_extensions(playing.extensions)
        self._rollout, self._reward, self._playing = rollout, reward, playing
        self._samples = None if playing.samples is None else SampleStore(playing.samples)
        self._tokenizer = load_tokenizer(model)
        self._trained = None if playing.share_with is None else self._engine_of(playing.share_with)
        # Generation that runs ahead in processes of its own goes on between calls; elsewhere it has its turns.
        self._goes_on = playing.share_with is None and rollout.is_streamed
        self._runner = ThreadRunner("rollout") if self._goes_on else CallRunner()
        self._clock = clock = None if playing.virtual_time is None else StepClock()
        media = self._make_engines(model)
        self._takes_media = media is not None
        self._pool = RewardPool(
            reward, tokenizer=model.path, rank=self.rank, count=self.world_size, logs=playing.logs
        )
        self._pool_runs = self._is_held = self._is_closed = False
        self._tally = Tally(playing.logs, rank=self.rank)
        asked = self._engines.client if clock is None else ClockedClient(self._engines.client, clock)
        self._schedule = RecordedSchedule(playing.version) if playing.is_replayed else None
        self._journal = Journal(asked, self._schedule)
        self._scores = ScoreJournal(self._pool)
        self._player = self._make_player(model, media, self._journal if rollout.is_streamed else asked)
        self._groups = GroupsInFlight(self._player, self._hear, clock=clock, time=playing.virtual_time)
        if self._goes_on:
            self._runner.run(_use_threads(torch.get_num_threads()))

    def _make_player(self, model: ModelConfig, media: MediaReader | None, client: GenerateClient) -> Player:
        playing, rollout = self._playing, self._rollout
        setup = AgentSetup(
            playing.agent, self._tokenizer,
            template_options=playing.template_options, max_prompt_tokens=playing.max_prompt_tokens,
        )  # fmt: skip
        recorded = None if playing.recording is None else open_recording(playing.recording, self._reward)
        return make_player(
            client, media, self._scores,
            model=model, setup=setup, rollout=rollout, seed=playing.seed, recording=recorded,
        )  # fmt: skip

    def _make_engines(self, model: ModelConfig) -> MediaReader | None:
        """Start the engines; how they are given media."""
        playing = self._playing
        place = Place(
            model=model,
            rollout=self._rollout,
            device=playing.device,
            version=playing.version,
            trained=self._trained,
            max_tokens=playing.max_tokens,
            logs=playing.logs,
            rank=self.rank,
            gate=None if self._clock is None else self._clock.gate,
        )
        self._engines = self._runner.run(make_serving(place))
        return self._take(self._engines.first)

    def _take(self, made: Generation) -> MediaReader | None:
        """Use this engine; where its weights come from other processes, they are received and verified here."""
        self._target = made.target
        self._receiving: ReceivingEngine | None = None
        if made.target is not None and self._trained is None:
            where = "cpu" if made.policy is None else made.policy.device.type
            self._receiving = weight_transfer().receiving(made.engine, made.target, device=where)
            self._engines.replace_first(self._receiving)
        return made.media

    def _hear_played(self, episode: Episode) -> None:
        self._tally.add(episode)
        if self._clock is not None:
            self._clock.end()

    def _hear(self, episode: Episode) -> None:
        """A sample of a group in flight has ended."""
        self._tally.add(episode)
        if self._schedule is not None:
            self._schedule.ended(episode.id)

    def _engine_of(self, role: str) -> TrainEngine:
        trained = self.colocated[role]
        assert isinstance(trained, TrainedWorker), f"{role} trains a model"
        return trained.engine

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def play(self, prompts: DataProto, samples_per_prompt: int, sampling: Sampling) -> DataProto:
        """Every sample of these prompts, played and scored.

        Args:
            prompts: column `prompt` of Prompt objects.
            samples_per_prompt: trajectories of each.
            sampling: options of every sample; key and token budget are filled in per sample.

        Returns:
            Columns `report` of EpisodeReport and `episode` of Episode, one row per sample in the order of prompts and
            samples.
        """
        asked = self._asked(prompts)
        if self._clock is not None:  # what is in play goes on meanwhile, in step with these
            self._clock.begin(len(asked) * samples_per_prompt)
        trains = not self._rollout.is_streamed and all(is_visit(prompt.uid) for prompt in asked)
        with self._generating():
            episodes = self._runner.run(
                self._player.play(
                    asked,
                    samples_per_prompt=samples_per_prompt,
                    sampling=sampling,
                    on_episode=self._hear_played,
                    after=self._groups.pass_time if trains else None,
                )
            )
        self._groups.forget([prompt.uid for prompt in asked])
        return self._told(episodes)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def begin(self, prompts: DataProto, samples_per_prompt: int, sampling: Sampling) -> None:
        """Begin every sample of these prompts; `ended` gives them. Arguments are those of `play`.

        Column `kept` says of each how far an earlier process came with it (`KeptGroup`), column `spans` which versions
        have to sample what (`Spans`; empty: all may).
        """
        asked = self._asked(prompts)
        columns = prompts.non_tensor_batch
        for prompt, kept, spans in zip(asked, columns["kept"], columns["spans"], strict=True):
            self._journal.follow(prompt.uid, kept.requests)
            self._scores.follow(prompt.uid, kept.scores)
            self._groups.follow(prompt.uid, kept.steps_left)
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
        return self._told([episode for group in groups for episode in group])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def forget(self, uids: Sequence[str]) -> dict[str, Spans]:
        """These prompts need not be played again, whatever happens; by uid of those of this worker, which versions
        sampled them."""
        self._scores.forget(uids)
        self._groups.forget(uids)
        return self._journal.forget(uids)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drop(self, uids: Sequence[str]) -> int:
        """Play these prompts no longer, and forget them; how many tokens they had here."""
        self._runner.run(self._groups.drop(uids))
        spans = self.forget(uids)
        return sum(count for own in spans.values() for pairs in own.values() for _, count in pairs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept(self) -> tuple[dict[str, KeptGroup], list[str]]:
        """By uid, how far the prompts are that were begun here and not forgotten; and which of those that were not
        given yet have ended, the first one first."""
        return self._runner.run(self._kept())

    async def _kept(self) -> tuple[dict[str, KeptGroup], list[str]]:
        scores, left = self._scores.notes(), self._groups.steps_left()
        kept = {
            uid: KeptGroup(requests=notes, scores=scores.get(uid, {}), steps_left=left.get(uid, {}))
            for uid, notes in (await self._journal.notes()).items()
        }
        return kept, self._groups.ended_uids()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def differing_requests(self) -> list[str]:
        """Ids of requests that were not those of an earlier process's notes, since the call before this one."""
        told, self._journal.differing = self._journal.differing, []
        return told

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def busy_s(self) -> float:
        """Seconds in which prompts that were begun were played."""
        return self._runner.run(self._groups.busy_s())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def clock_steps(self) -> int:
        """Engine steps so far, by the clock of trainer.clock=virtual; 0 without it."""
        return self._groups.clock_steps

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """While samples are played. Where the policy is somebody else's, what goes on afterwards is held until the next
        time."""
        shared = self._trained if self._target is None else None
        with contextlib.nullcontext() if shared is None else shared.full_parameters():
            if not self._pool_runs:
                self._runner.run(self._pool.start())
                self._pool_runs = True
            self._engines.begin()
            self._runner.run(self._engines.wake_up())
            if self._is_held:
                self._runner.run(self._engines.resume())
                self._is_held = False
            self._tally.begin()
            yield
            if not self._goes_on and not self._groups.is_idle:
                self._runner.run(self._engines.pause())
                self._is_held = True

    def _asked(self, prompts: DataProto) -> list[Prompt]:
        asked: list[Prompt] = list(prompts.non_tensor_batch["prompt"])
        if self._playing.keeps_text and any(prompt.media for prompt in asked):
            raise ValueError(
                "prompts have images, which the reward model would not see: remove reward_model.path, or the images"
            )
        return asked

    def _told(self, episodes: Sequence[Episode]) -> DataProto:
        """What came of them, in columns `report` and `episode`."""
        if self._playing.keeps_text and any(one.media for episode in episodes for one in episode.sequences):
            raise ValueError(
                "a tool gave images, which the reward model would not see: remove reward_model.path, or have tools "
                "give text"
            )
        reports = [report_of(episode) for episode in episodes]
        return DataProto.from_dict({}, non_tensors={"report": reports, "episode": episodes})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tell_spent(self, run_spent: Mapping[str, float]) -> None:
        """What services of the reward have cost the run so far: each worker may spend its share of the rest."""
        self._pool.tell_spent(run_spent)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def spent(self) -> dict[str, float]:
        """What services of the reward have cost in this process."""
        return self._pool.spent()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def rows(self, episodes: DataProto) -> DataProto:
        """The training rows of these episodes, in order (see `training_rows`).

        Args:
            episodes: column `episode`, each with a sampled token; `reward` [B], what it is trained with.
        """
        return training_rows(
            episodes,
            self._playing,
            temperature=self._rollout.temperature,
            turn_weight=self._reward.weight,
            has_media=self._takes_media,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def write_samples(self, step: int, episodes: DataProto, *, split: str) -> None:
        """Samples with all their tokens into the sample store; each rank writes its own.

        Args:
            step, split: of the file.
            episodes: columns `episode`, `decided`, what came of it, and `has_numbers`, whether it has those of its
                tokens: old_log_probs (of the step itself, as log_probs), entropys and advantages [B, R~].

        Raises:
            RunError: the disk refused.
        """
        assert self._samples is not None, "the role was made without a sample store"
        rows = saved_rows(episodes, self._tokenizer, keeps_row=self._playing.keeps_rows)
        self._samples.write(step, rows, split=split, part=self.rank, parts=self.world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_version(self, version: int) -> None:
        """The shared parameters hold this policy version now; an engine with weights of its own takes them over."""
        self._engines.begin()
        self._runner.run(self._engines.set_version(version))
        self._reached(version)

    def _reached(self, version: int) -> None:
        if self._schedule is not None:
            self._runner.run(self._schedule.reach(version))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_weights(self, probe: Probe, version: int) -> None:
        """An engine whose weights cannot be read, and that can score tokens, gives what the trainer's model gives.

        Raises:
            SyncCorrupted: it does not, or gives nothing for rollout.timeout_s.
        """
        if self._is_held:  # an engine that is paused scores nothing either
            self._runner.run(self._engines.resume())
        self._runner.run(self._engines.check(probe, version, limit_s=self._rollout.timeout_s))
        if self._is_held:
            self._runner.run(self._engines.pause())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_sync(self, endpoint: Endpoint) -> None:
        """Meet the actor that will send weights."""
        self._own_engine().join(endpoint, index=self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, version: int) -> SyncReport:
        """Take part in the sync to this version, while the actor calls `send_weights`.

        Raises:
            SyncError: it was incomplete, corrupted or refused; nothing is generated until one succeeds.
        """
        report = self._runner.run(self._own_engine().update_weights(version))
        self._reached(version)
        return report

    def _own_engine(self) -> ReceivingEngine:
        if self._receiving is None:
            raise ValueError(
                "generation uses the actor's own weights in this process; there is nothing to receive"
            )
        return self._receiving

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_lost_engines_again(self) -> int:
        """How many engines did not serve, and were started again; they generate once they have weights again.

        None where they are started again without anybody's help.
        """
        started = self._runner.run(self._engines.start_lost_again())
        if started and self._trained is None:
            self._take(self._engines.first)
        return started

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def engine_losses(self) -> list[str]:
        """A sentence for each engine that was lost and started again since the call before this one."""
        return self._engines.told()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Give the memory of the key-value cache back, unless an engine of its own is at work; the next call takes it
        again."""
        if self._groups.is_idle or (self._is_held and self._target is None):
            self._runner.run(self._engines.sleep())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """The role is idle: the shared model leaves the device until it is called again; an own one stays."""
        if self._trained is not None:
            self._trained.offload()

    def close(self) -> None:
        """End the scorers and the loop. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._runner.run(self._groups.close())
            self._runner.run(self._pool.close())
            self._runner.run(self._engines.close())
            self._player.close()
            self._runner.close()


async def _use_threads(count: int) -> None:
    """In the thread of the loop, which begins with a number of its own."""
    torch.set_num_threads(count)
