"""Generation as a role: agents, engine and scorers in one process, which plays its share of the prompts.

Prompts go in, episodes come out; the controller reads their reports and hands a reference to the rest on, so that it
never handles tokens. The policy is either that of a training role in the same process, whose own parameters are used
(no copy), or a copy of the worker's own that `receive_weights` keeps up to date.

Concurrency: the worker is called from one thread. Inside `run_episodes` an asyncio loop, kept over all calls, runs
the agents, the engine and the reward pool; its waits have the deadlines rollout.timeout_s and
reward.timeout_s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from strop.agents.config import AgentConfig
from strop.agents.setup import AgentSetup
from strop.algorithms.registry import load_extensions
from strop.controller import Dispatch, Worker, register
from strop.engines.checksum.models import dtype_name
from strop.engines.config import ModelConfig
from strop.engines.kinds import TrainableEngine
from strop.engines.multimodal.vl_model import Reader
from strop.engines.tokenizer import load_tokenizer
from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt
from strop.rewards import RewardConfig, RewardPool
from strop.rollout.client import GenerateClient
from strop.rollout.config import RolloutConfig
from strop.rollout.engine_group import EngineContext, Generation
from strop.rollout.engine_setup import make_engine_group
from strop.rollout.routing.client import RoutedClient
from strop.rollout.routing.router import RouterAddress
from strop.rollout.types import Sampling
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.types import Endpoint, Probe, SyncError, SyncReport
from strop.rollout.weight_sync.verified_engine import VerifiedEngine
from strop.run.samples import SampleStore
from strop.utils.call_loop import CallEventLoop
from strop.utils.machine_limits import usable_cores
from strop.workers.episode_scores import Scorers
from strop.workers.episodes import Episode, episode_rows
from strop.workers.estimator_columns import part_columns, step_columns
from strop.workers.models import TrainedWorker
from strop.workers.player import EpisodeRunner, make_episode_runner
from strop.workers.progress import Tally
from strop.workers.replayed_samples import open_recording
from strop.workers.reports import episode_report
from strop.workers.sample_rows import saved_rows
from strop.workers.tracing.timeline import TimelineObserver

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Settings of a `RolloutWorker` beside its model and the sections rollout and reward."""

    device: str
    """Device of the policy, if it is the worker's own."""
    seed: int
    """Seed of the run; with a prompt's uid and the sample's number it fixes every random number."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Agents and tools; single turns unless it says otherwise."""
    template_options: Mapping[str, Any] | None = None
    """Variables of the chat template."""
    max_prompt_tokens: int | None = None
    """Longest prompt of the run."""
    max_tokens: int = 0
    """Longest sequence, prompt and response, for engines that plan their memory by it."""
    version: int = 0
    """Policy version that the weights hold."""
    share_with: str | None = None
    """Role in this process whose model generates; None for a copy of the worker's own."""
    extensions: tuple[str, ...] = ()
    """Files of the user's that register an engine."""
    is_replayed: bool = False
    """Requests wait for the versions that sampled them in another run."""
    recording: Path | None = None
    """A run whose samples are taken in place of new ones."""

    keeps_text: bool = False
    """Add columns raw_prompt and response_text to the rows, for a reward model."""
    reward_keys: tuple[str, ...] = ()
    """Parts of the reward that become the column reward_parts."""
    anchor_similarity: float | None = None
    """Add the columns of single answers, with this similarity; None: not."""
    samples: Path | None = None
    """Folder of the sample store that `write_samples` writes to."""
    keeps_rows: bool = False
    """Write what rewards get of the dataset rows as well, which cannot be read again by number."""
    logs: Path | None = None
    """Folder for what the engine and reward functions print, and for how far a call is."""


class EventLoop(Protocol):
    """An event loop that runs coroutines for callers outside of it."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, when it has one."""
        ...

    def close(self) -> None:
        """Cancel what is left, and end the loop; a second call does nothing."""
        ...


class RolloutWorker(Worker):
    """Rollout role: runs the episodes of prompts, and makes training batches and saved samples of them. It
    keeps no state of samples between calls."""

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, reward: RewardConfig, settings: RolloutSettings
    ) -> None:
        """Load tokenizer and policy.

        Args:
            model: the folder of the policy.
            rollout, reward: how to generate and to score.
            settings: all else.
        """
        super().__init__()
        load_extensions(settings.extensions)
        self._rollout, self._reward, self._settings = rollout, reward, settings
        self._samples = None if settings.samples is None else SampleStore(settings.samples)
        self._tokenizer = load_tokenizer(model)
        self._trained = None if settings.share_with is None else self._engine_of(settings.share_with)
        self._event_loop = self._make_event_loop()
        media = self._make_engines(model)
        self._takes_media = media is not None
        self._routed = RoutedClient(
            self._engines.client,
            begins_again=rollout.deterministic,
            records_routing=rollout.router_replay,
        )
        self._pool = RewardPool(
            reward, tokenizer=model.path, rank=self.rank, count=self.world_size, logs=settings.logs
        )
        self._is_pool_started = self._is_closed = False
        self._tally = Tally(settings.logs, rank=self.rank)
        self._episode_runner = self._make_episode_runner(model, media)

    def _make_event_loop(self) -> EventLoop:
        """The event loop of the agents, the engine and the scorers."""
        return CallEventLoop()

    def _clients(self) -> tuple[GenerateClient, Scorers]:
        """Client of the engines and pool of scorers that episodes use."""
        return self._routed, self._pool

    def _make_episode_runner(self, model: ModelConfig, media: Reader | None) -> EpisodeRunner:
        settings, (client, scorers) = self._settings, self._clients()
        setup = AgentSetup(
            settings.agent, self._tokenizer,
            template_options=settings.template_options, max_prompt_tokens=settings.max_prompt_tokens,
            records_routing=self._rollout.router_replay,
        )  # fmt: skip
        recorded = None
        if settings.recording is not None:
            recorded = open_recording(settings.recording, self._reward)
        return make_episode_runner(
            client, media, scorers,
            model=model, setup=setup, rollout=self._rollout, seed=settings.seed, recording=recorded,
            reward_keys=settings.reward_keys, scores_text_alone=settings.keeps_text,
            observers=(TimelineObserver(self.timeline_track),),
        )  # fmt: skip

    def _make_engines(self, model: ModelConfig) -> Reader | None:
        """Start the engines; gives the reader of media, None where they are given text alone."""
        self._engines = self._event_loop.run(make_engine_group(self._engine_context(model)))
        return self._attach_engine(self._engines.first)

    def _engine_context(self, model: ModelConfig) -> EngineContext:
        settings = self._settings
        return EngineContext(
            model=model,
            rollout=self._rollout,
            device=settings.device,
            version=settings.version,
            trained=self._trained,
            max_tokens=settings.max_tokens,
            logs=settings.logs,
            rank=self.rank,
            node=self.placement.node,
            followers=self.placement.followers,
        )

    def _attach_engine(self, generation: Generation) -> Reader | None:
        """Use this engine; where its weights come from other processes, they are received and verified here."""
        self._target = generation.target
        self._receiving: VerifiedEngine | None = None
        if generation.target is not None and self._trained is None:
            device = "cpu" if generation.policy is None else str(generation.policy.device)
            receiver = WeightReceiver(generation.target, device=device)
            self._receiving = VerifiedEngine(generation.engine, receiver)
            self._engines.set_engine(self._receiving)
        return generation.media

    def _engine_of(self, role: str) -> TrainableEngine:
        trained = self.colocated[role]
        assert isinstance(trained, TrainedWorker), f"{role} trains a model"
        return trained.engine

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, allows_losses=True)
    def run_episodes(self, prompts: DataProto, samples_per_prompt: int, sampling: Sampling) -> DataProto:
        """Sample and score every episode of these prompts.

        Args:
            prompts: column `prompt` of Prompt objects.
            samples_per_prompt: trajectories of each.
            sampling: options of every sample; key and token budget are filled in per sample.

        Returns:
            Columns `report` of EpisodeReport and `episode` of Episode, one row per sample in the order of prompts and
            samples; of a group, without the prompts of workers that were lost meanwhile.
        """
        batch: list[Prompt] = list(prompts.non_tensor_batch["prompt"])
        self._check_media(batch)
        with self._generating():
            work = self._episode_runner.run(
                batch,
                samples_per_prompt=samples_per_prompt,
                sampling=sampling,
                on_episode=self._on_episode,
            )
            episodes = self._event_loop.run(self._together(work))
        reports = [episode_report(episode) for episode in episodes]
        return DataProto.from_dict({}, non_tensors={"report": reports, "episode": episodes})

    def _together(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """The work of this worker in a step; its engines serve the other workers too, until all have ended."""
        return self._routed.run_together(work, version=self._engines.first.engine.version)

    def _on_episode(self, episode: Episode) -> None:
        self._tally.add(episode)

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """Context in which samples are generated."""
        shared = self._trained if self._target is None else None
        with contextlib.nullcontext() if shared is None else shared.full_parameters():
            if not self._is_pool_started:
                self._event_loop.run(self._pool.start())
                self._is_pool_started = True
            self._engines.begin()
            self._event_loop.run(self._engines.wake_up())
            self._tally.reset()
            try:
                yield
            except Exception as error:
                self._event_loop.run(self._engines.leave(str(error) or type(error).__name__))
                raise
            self._event_loop.run(self._engines.leave())

    def _check_media(self, prompts: Iterable[Prompt]) -> None:
        """Refuse images in the data, which a reward model would not see."""
        if self._settings.keeps_text and any(prompt.media for prompt in prompts):
            raise ValueError(
                "prompts have images, which the reward model would not see: remove reward_model.path, or the images"
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_cost(self, run_cost: Mapping[str, float]) -> None:
        """Set the cost of reward services for the run so far: each worker may spend its share of the rest."""
        self._pool.set_cost(run_cost)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def cost(self) -> dict[str, float]:
        """Cost of reward services in this process."""
        return self._pool.cost()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make_training_batch(self, episodes: DataProto) -> DataProto:
        """The training rows of these episodes, in order (see `episode_rows`), with what roles and estimators of the run
        need of them.

        Args:
            episodes: column `episode`, each with a sampled token; `reward` [B], what it is trained with.
        """
        settings, turn_weight = self._settings, self._reward.weight
        batch: list[Episode] = list(episodes.non_tensor_batch["episode"])
        rewards: list[float] = episodes.tensors()["reward"].tolist()
        rows = episode_rows(batch, rewards, temperature=self._rollout.temperature, turn_weight=turn_weight)
        if settings.reward_keys:
            rows = rows.union(part_columns(batch, settings.reward_keys))
        if settings.anchor_similarity is not None:
            similarity = settings.anchor_similarity
            rows = rows.union(step_columns(batch, rewards, turn_weight=turn_weight, similarity=similarity))
        objects: dict[str, list[Any]] = {}
        sequences = [sequence for episode in batch for sequence in episode.sequences]
        if self._takes_media:  # roles with a vision-language model need those of prompt and response
            objects["media"] = [sequence.media for sequence in sequences]
        if settings.keeps_text:
            objects["raw_prompt"] = [list(episode.prompt.messages) for episode in batch]
            objects["response_text"] = [episode.text for episode in batch]
        return rows.union(DataProto.from_dict({}, non_tensors=objects)) if objects else rows

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def write_samples(self, step: int, episodes: DataProto, *, split: str, ranks: Sequence[int]) -> None:
        """Write samples with all their tokens into the sample store; each rank writes its own.

        Args:
            step, split: of the file.
            ranks: of all workers that write.
            episodes: columns `episode`, `decided`, what came of it, and `has_numbers`, whether it has those of its
                tokens: old_log_probs (of the step itself, as log_probs), entropys and advantages [B, R~].

        Raises:
            RunError: the disk refused.
        """
        assert self._samples is not None, "the role was made without a sample store"
        rows = saved_rows(episodes, self._tokenizer, keeps_row=self._settings.keeps_rows)
        part = list(ranks).index(self.rank)
        self._samples.write(step, rows, split=split, part=part, parts=len(ranks))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_version(self, version: int) -> None:
        """The shared parameters hold this policy version now; an engine with weights of its own takes them over."""
        self._engines.begin()
        self._event_loop.run(self._engines.set_version(version))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_weights(self, probe: Probe, version: int) -> None:
        """An engine whose weights cannot be read, and that can score tokens, gives what the trainer's model gives.

        Raises:
            SyncCorrupted: it does not, or gives nothing for rollout.timeout_s.
        """
        self._event_loop.run(self._engines.check(probe, version, limit_s=self._rollout.timeout_s))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_router(self, address: RouterAddress) -> None:
        """Serve the requests of all rollout workers, and have them served by all."""
        continues = "continues_stream" in self._engines.first.engine.abilities
        shares_cores = self._settings.device == "cpu" and self.local_world_size > usable_cores()
        joining = self._routed.join(
            address,
            index=self.rank,
            host=self.placement.node,
            capacity=self._rollout.max_running * self._rollout.replicas,
            # Processes that share a core gain nothing: what one takes over, the other loses.
            can_continue=continues and not self._rollout.deterministic and not shares_cores,
            copy=self._first_of_copy(),
        )
        self._event_loop.run(joining)

    def _first_of_copy(self) -> int:
        """Lowest rank of those that generate together with one copy of the model."""
        policy = self._engines.first.policy
        group = None if policy is None else policy.copy_group
        return self.rank if group is None else min(dist.get_process_group_ranks(group))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_dtypes(self) -> dict[str, str]:
        """Names of the dtypes in which the engine holds each weight that it is sent."""
        if self._target is None:
            return {}
        held = self._target.weights_metadata().dtypes
        return {name: dtype_name(dtype) for name, dtype in held.items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_sync(self, endpoint: Endpoint, ranks: Sequence[int]) -> None:
        """Connect to the actor that will send weights to the workers of these ranks."""
        self._own_engine().join(endpoint, index=list(ranks).index(self.rank))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, version: int) -> SyncReport:
        """Take part in the sync to this version, while the actor calls `send_weights`.

        One that was incomplete, corrupted or refused is reported as such; nothing is generated until one succeeds.
        """
        try:
            return self._event_loop.run(self._own_engine().update_weights(version))
        except SyncError as error:
            return SyncReport.failed(version, error)

    def _own_engine(self) -> VerifiedEngine:
        if self._receiving is None:
            raise ValueError(
                "generation uses the actor's own weights in this process; there is nothing to receive"
            )
        return self._receiving

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restart_failed_engines(self) -> int:
        """Start engines that failed again, and give their number; they generate once they have weights again.

        0 where they are started again without anybody's help.
        """
        started = self._event_loop.run(self._engines.restart_failed_engines())
        if started and self._trained is None:
            self._attach_engine(self._engines.first)
        return started

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pop_engine_failures(self) -> list[str]:
        """A sentence for each engine that failed and was started again since the call before this one."""
        return self._engines.pop_restarts()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Give the memory of the key-value cache back; the next call takes it again."""
        self._event_loop.run(self._engines.sleep())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave_for_updates(self, num_bytes: int) -> None:
        """As `EngineGroup`: memory that the updates on this device leave beside them, as their rehearsal has it."""
        self._engines.leave_for_updates(num_bytes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """The role is idle: the shared model, and what generation holds beside it, leaves the device until it is
        called again; an own one stays."""
        if self._trained is not None:
            self._event_loop.run(self._engines.first.engine.sleep())
            self._trained.offload()

    def close(self) -> None:
        """End the scorers and the loop. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._event_loop.run(self._pool.close())
            self._event_loop.run(self._routed.close())
            self._event_loop.run(self._engines.close())
            self._episode_runner.close()
            self._event_loop.close()
