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
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from strop.agents.config import AgentConfig
from strop.agents.setup import AgentSetup
from strop.algorithms.registry import load_extensions
from strop.controller import Dispatch, Worker, register
from strop.engines.config import ModelConfig
from strop.engines.model import load_tokenizer
from strop.engines.training import TrainEngine
from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt
from strop.rewards import RewardConfig, RewardPool
from strop.rollout.client import GenerateClient
from strop.rollout.config import RolloutConfig
from strop.rollout.engine_group import Generation, Place
from strop.rollout.serving import make_serving
from strop.rollout.types import Sampling
from strop.rollout.weight_sync.transfer import ReceivingEngine, weight_transfer
from strop.rollout.weight_sync.types import Endpoint, Probe, SyncReport
from strop.run.samples import SampleStore
from strop.utils.call_loop import CallRunner
from strop.workers.episodes import Episode, episode_rows
from strop.workers.estimator_columns import part_columns, step_columns
from strop.workers.models import TrainedWorker
from strop.workers.player import Player, Scorers, make_player
from strop.workers.progress import Tally
from strop.workers.replayed_samples import open_recording
from strop.workers.reports import report_of
from strop.workers.sample_rows import saved_rows

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Playing:
    """What a `RolloutWorker` is told beside its model, and how to generate and to score."""

    device: str
    """Where the policy is, if it is the worker's own."""
    seed: int
    """Of the run; with a prompt's uid and the sample's number it fixes every random number."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Agents and tools; single turns unless it says otherwise."""
    template_options: Mapping[str, Any] | None = None
    """Variables of the chat template."""
    max_prompt_tokens: int | None = None
    """Of any prompt of the run."""
    max_tokens: int = 0
    """Of the longest sequence, prompt and response, for engines that plan their memory by it."""
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


class Runner(Protocol):
    """Runs coroutines on one loop, from outside of it."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, when it has one."""
        ...

    def close(self) -> None:
        """Cancel what is left, and end the loop; a second call does nothing."""
        ...


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
        self._runner = self._make_runner()
        media = self._make_engines(model)
        self._takes_media = media is not None
        self._pool = RewardPool(
            reward, tokenizer=model.path, rank=self.rank, count=self.world_size, logs=playing.logs
        )
        self._pool_runs = self._is_closed = False
        self._tally = Tally(playing.logs, rank=self.rank)
        self._player = self._make_player(model, media)

    def _make_runner(self) -> Runner:
        """Runs the loop of the agents, the engine and the scorers."""
        return CallRunner()

    def _asked(self) -> tuple[GenerateClient, Scorers]:
        """What the player asks for tokens and for scores."""
        return self._engines.client, self._pool

    def _make_player(self, model: ModelConfig, media: Any) -> Player:
        playing, (client, scorers) = self._playing, self._asked()
        setup = AgentSetup(
            playing.agent, self._tokenizer,
            template_options=playing.template_options, max_prompt_tokens=playing.max_prompt_tokens,
        )  # fmt: skip
        recorded = None
        if playing.recording is not None:
            recorded = open_recording(playing.recording, self._reward)
        return make_player(
            client, media, scorers,
            model=model, setup=setup, rollout=self._rollout, seed=playing.seed, recording=recorded,
            reward_keys=playing.reward_keys, scores_text_alone=playing.keeps_text,
        )  # fmt: skip

    def _make_engines(self, model: ModelConfig) -> Any:
        """Start the engines; how they are given media."""
        self._engines = self._runner.run(make_serving(self._place(model)))
        return self._take(self._engines.first)

    def _place(self, model: ModelConfig) -> Place:
        playing = self._playing
        return Place(
            model=model,
            rollout=self._rollout,
            device=playing.device,
            version=playing.version,
            trained=self._trained,
            max_tokens=playing.max_tokens,
            logs=playing.logs,
            rank=self.rank,
        )

    def _take(self, made: Generation) -> Any:
        """Use this engine; where its weights come from other processes, they are received and verified here."""
        self._target = made.target
        self._receiving: ReceivingEngine | None = None
        if made.target is not None and self._trained is None:
            where = "cpu" if made.policy is None else made.policy.device.type
            self._receiving = weight_transfer().receiving(made.engine, made.target, device=where)
            self._engines.replace_first(self._receiving)
        return made.media

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
        asked: list[Prompt] = list(prompts.non_tensor_batch["prompt"])
        self._refuse_media(asked)
        with self._generating():
            work = self._player.play(
                asked,
                samples_per_prompt=samples_per_prompt,
                sampling=sampling,
                on_episode=self._hear_played,
            )
            episodes = self._runner.run(work)
        reports = [report_of(episode) for episode in episodes]
        return DataProto.from_dict({}, non_tensors={"report": reports, "episode": episodes})

    def _hear_played(self, episode: Episode) -> None:
        if self._tally is not None:
            self._tally.add(episode)

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """While samples are played."""
        shared = self._trained if self._target is None else None
        with contextlib.nullcontext() if shared is None else shared.full_parameters():
            if not self._pool_runs:
                self._runner.run(self._pool.start())
                self._pool_runs = True
            self._engines.begin()
            self._runner.run(self._engines.wake_up())
            if self._tally is not None:
                self._tally.begin()
            yield

    def _refuse_media(self, prompts: Iterable[Prompt]) -> None:
        """Refuse images in the data, which a reward model would not see."""
        if self._playing.keeps_text and any(prompt.media for prompt in prompts):
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
    def rows(self, episodes: DataProto) -> DataProto:
        """The training rows of these episodes, in order (see `episode_rows`), with what roles and estimators of the run
        need of them.

        Args:
            episodes: column `episode`, each with a sampled token; `reward` [B], what it is trained with.
        """
        playing, turn_weight = self._playing, self._reward.weight
        kept: list[Episode] = list(episodes.non_tensor_batch["episode"])
        earned: list[float] = episodes.tensors()["reward"].tolist()
        rows = episode_rows(kept, earned, temperature=self._rollout.temperature, turn_weight=turn_weight)
        if playing.reward_keys:
            rows = rows.union(part_columns(kept, playing.reward_keys))
        if playing.anchor_similarity is not None:
            similarity = playing.anchor_similarity
            rows = rows.union(step_columns(kept, earned, turn_weight=turn_weight, similarity=similarity))
        objects: dict[str, list[Any]] = {}
        sequences = [sequence for one in kept for sequence in one.sequences]
        if self._takes_media:  # roles with a vision-language model need those of prompt and response
            objects["media"] = [sequence.media for sequence in sequences]
        if playing.keeps_text:
            objects["raw_prompt"] = [list(one.prompt.messages) for one in kept]
            objects["response_text"] = [one.text for one in kept]
        return rows.union(DataProto.from_dict({}, non_tensors=objects)) if objects else rows

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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_weights(self, probe: Probe, version: int) -> None:
        """An engine whose weights cannot be read, and that can score tokens, gives what the trainer's model gives.

        Raises:
            SyncCorrupted: it does not, or gives nothing for rollout.timeout_s.
        """
        self._runner.run(self._engines.check(probe, version, limit_s=self._rollout.timeout_s))

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
        return self._runner.run(self._own_engine().update_weights(version))

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
        """Give the memory of the key-value cache back; the next call takes it again."""
        self._runner.run(self._engines.sleep())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """The role is idle: the shared model, and what generation holds beside it, leaves the device until it is
        called again; an own one stays."""
        if self._trained is not None:
            self._runner.run(self._engines.first.engine.sleep())
            self._trained.offload()

    def close(self) -> None:
        """End the scorers and the loop. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._runner.run(self._pool.close())
            self._runner.run(self._engines.close())
            self._player.close()
            self._runner.close()
