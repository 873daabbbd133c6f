"""Episode runner: every sample of a prompt through its agent and its scorers, all at the same time.

One class for all callers: training, validation, evaluation, the preflight and `strop generate`. It holds what
belongs together in one process: the engine's client, agents with all they need, and the scorers.

Concurrency: one asyncio loop. A sample is scored as soon as it ends, while others still generate; the samples of a
prompt come out when the last of them has ended. This is the one place that may catch an agent's exception: the episode
is recorded as failed with its reason, and the trainer ends the run when there are too many of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from strop.agents.config import AgentConfig
from strop.agents.episodes import play_episode
from strop.agents.setup import AgentSetup
from strop.agents.spans import SPANS, Span, add_span
from strop.data.visit_ids import is_visit
from strop.engines.config import ModelConfig
from strop.engines.multimodal.vl_model import Reader
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rollout.client import GenerateClient
from strop.rollout.config import RolloutConfig
from strop.rollout.types import Sampling
from strop.utils.activity import waiting_on
from strop.utils.sanitize import described
from strop.workers.tracing.observer import episode_observers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
from strop.workers.agent_pool.pool import AgentWorkers
from strop.workers.episode_scores import EpisodeScores, Scorers
from strop.workers.episodes import Episode, EpisodeFailed, EpisodeTimes
from strop.workers.replayed_samples import Recording

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _EpisodeTiming:
    """Start and end of an episode, in seconds since the epoch, and its spans; None of one that was not
    played."""

    spans: list[Span] | None = None
    start_s: float = 0.0
    end_s: float = 0.0


RunEpisode = Callable[[Prompt, int, Sampling], Awaitable[tuple[Trajectory, ...]]]
"""Runs the episode of a prompt's sample with this number once; gives its training sequences."""


class EpisodeObserver(Protocol):
    """Callbacks for every episode, with its spans; they raise nothing and wait for nothing."""

    @property
    def listens(self) -> bool:
        """An episode that begins now is asked for its spans."""
        ...

    def start(self) -> None:
        """Called before the first episode; a further call does nothing new."""
        ...

    def on_episode_end(self, episode: Episode, spans: Sequence[Span], start_s: float, end_s: float) -> None:
        """Called after an episode, with its start and end in seconds since the epoch."""
        ...

    def close(self) -> None:
        """Nothing more is played; a second call does nothing."""
        ...


class EpisodeRunner:
    """Runs episodes of prompts with one client and one pool of scorers; `close` ends what its agents need."""

    def __init__(
        self,
        client: GenerateClient,
        tokenizer: PreTrainedTokenizerBase,
        scorers: Scorers | None,
        *,
        seed: int,
        setup: AgentSetup | None = None,
        observers: Sequence[EpisodeObserver] = (),
        max_episodes: int | None = None,
        recording: Recording | None = None,
        workers: AgentWorkers | None = None,
        reward_keys: Sequence[str] = (),
        scores_text_alone: bool = False,
    ) -> None:
        """Start what the agents need, such as a sandbox.

        Args:
            client: generates.
            tokenizer: of the model.
            scorers: they run while episodes run, and stay the caller's to close; None: nothing is scored.
            seed: of the run.
            setup: agents; None for single turns.
            observers: called for every episode; the runner closes them.
            max_episodes: at the same time, so that no time of an episode is spent waiting for its turn; None: all.
            recording: gives the samples of training visits in place of agents and scorers; None: they are played.
            workers: processes that play the episodes; None: they are played in this one. The runner closes them.
            reward_keys: parts of the reward without which a sample of a training visit could not be scored.
            scores_text_alone: a reward model scores as well, which is shown no images: samples with any could not be
                scored.

        Raises:
            ValueError: something of it cannot be started here.
        """
        self._observers = tuple(observers)
        self._scores = EpisodeScores(
            scorers, tokenizer, reward_keys=reward_keys, scores_text_alone=scores_text_alone
        )
        self._setup = setup or AgentSetup(AgentConfig(), tokenizer)
        self._recording, self._workers = recording, workers
        run_here = partial(play_episode, client=client, seed=seed, setup=self._setup)
        self._run_agent: RunEpisode = run_here if workers is None else workers.play
        self._slots = contextlib.nullcontext() if max_episodes is None else asyncio.Semaphore(max_episodes)
        if scorers is not None and setup is not None and workers is None:
            setup.start(scorers.config)

    async def run(
        self,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        on_episode: Callable[[Episode], None] = lambda episode: None,
    ) -> list[Episode]:
        """All samples of all prompts, in the order of the prompts and sample numbers; all are begun at once.

        Args:
            prompts: each with a uid of its own.
            samples_per_prompt: at least 1.
            sampling: options of every sample; key and token budget are filled in per sample.
            on_episode: called with each sample as it ends.

        Raises:
            RewardError: the scorers cannot go on.
            ValueError, RuntimeError: the agents cannot be loaded in processes of their own.
        """
        await self.start()
        async with _tasks() as tasks:
            groups = [
                tasks.create_task(
                    self.run_group(
                        prompt,
                        samples_per_prompt=samples_per_prompt,
                        sampling=sampling,
                        on_episode=on_episode,
                    )
                )
                for prompt in prompts
            ]
        return [episode for group in groups for episode in group.result()]

    async def start(self) -> None:
        """Start the processes and observers that `run_group` needs.

        Raises:
            ValueError, RuntimeError: as `run`.
        """
        if self._workers is not None:
            await self._workers.start()
        for observer in self._observers:
            observer.start()

    async def run_group(
        self,
        prompt: Prompt,
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        on_episode: Callable[[Episode], None] = lambda episode: None,
    ) -> tuple[Episode, ...]:
        """The samples of one prompt, by number; arguments and errors are those of `run`, after `start`."""
        is_recorded = self._recording is not None and is_visit(prompt.uid)
        compares = self._scores.compares and not is_recorded

        async def sample(index: int) -> tuple[Episode, _EpisodeTiming]:
            episode, times = await self._run_observed(prompt, index, sampling, in_group=True)
            if not compares:
                self._notify_observers(episode, times)
            on_episode(episode)
            return episode, times

        async with _tasks() as tasks:
            samples = [tasks.create_task(sample(index)) for index in range(samples_per_prompt)]
        episodes = tuple(task.result()[0] for task in samples)
        if not compares:
            return episodes
        start, end = time.perf_counter(), max(episode.times.scored_s for episode in episodes)
        episodes = await self._scores.compared(prompt, episodes)
        seconds = time.perf_counter() - start
        episodes = tuple(
            replace(episode, times=episode.times._replace(scored_s=end + seconds)) for episode in episodes
        )
        for episode, (_, times) in zip(episodes, (task.result() for task in samples), strict=True):
            if (outcome := episode.outcome) is not None:
                facts = {"outcome": outcome.kind, "score": outcome.score}
                add_span(times.spans, "reward", "comparison", seconds, **facts)
            self._notify_observers(episode, replace(times, end_s=time.time()))
        return episodes

    async def run_episode(self, prompt: Prompt, sample_index: int, sampling: Sampling) -> Episode:
        """One sample of one prompt, played and scored.

        Args:
            prompt, sample_index: whose sample it is.
            sampling: as in `run`.

        Raises:
            EpisodeTimeout, RolloutTimeout, ValueError and whatever an agent raises: the episode failed.
            RewardError: the scorers cannot go on.
        """
        episode, times = await self._run_observed(prompt, sample_index, sampling, in_group=False)
        self._notify_observers(episode, times)
        return episode

    def _notify_observers(self, episode: Episode, times: _EpisodeTiming) -> None:
        if times.spans is not None:
            for observer in self._observers:
                observer.on_episode_end(episode, times.spans, times.start_s, times.end_s)

    async def _run_observed(
        self, prompt: Prompt, sample_index: int, sampling: Sampling, *, in_group: bool
    ) -> tuple[Episode, _EpisodeTiming]:
        """As `run_episode`, with its timing. In a group an agent that fails gives an episode that says why, and scorers
        that compare answers are called later."""
        if self._recording is not None and is_visit(prompt.uid):
            recorded = self._recording.episode(prompt, sample_index)
            if recorded.outcome is not None:
                recorded = replace(recorded, outcome=self._scores.with_parts(prompt, recorded.outcome))
            return recorded, _EpisodeTiming()
        spans, start, failure = list[Span](), time.time(), None
        begin, played = time.perf_counter(), 0.0
        sequences: tuple[Trajectory, ...] = ()
        token = SPANS.set(spans if any(observer.listens for observer in self._observers) else None)
        try:
            with waiting_on(f"{prompt.uid}/{sample_index}") as set_stage:
                try:
                    async with self._slots:
                        set_stage("played")
                        sequences = await self._run_agent(prompt, sample_index, sampling)
                except Exception as error:
                    if not in_group:
                        raise
                    logger.exception("episode %s/%d failed", prompt.uid, sample_index)
                    failure = str(error) if isinstance(error, EpisodeFailed) else described(error)
                played = time.perf_counter() - begin
                if sequences:
                    set_stage("scored")
                    episode = await self._scores.scored(prompt, sequences, in_group=in_group)
                elif failure is None:
                    nothing = Trajectory(
                        uid=prompt.uid, sample_index=sample_index, prompt_ids=prompt.token_ids
                    )
                    finished = nothing.finish("the agent gave no sequence")
                    episode = Episode(prompt=prompt, sample_index=sample_index, trajectory=finished)
                else:
                    episode = Episode(
                        prompt=prompt, sample_index=sample_index, trajectory=None, failure=failure
                    )
        finally:
            SPANS.reset(token)
        episode = replace(episode, times=EpisodeTimes(played, time.perf_counter() - begin))
        return episode, _EpisodeTiming(spans=spans, start_s=start, end_s=time.time())

    def close(self) -> None:
        """End what was started, while the loop that played can still run; a second call does nothing."""
        if self._workers is not None:
            self._workers.close()
        self._setup.close()
        for observer in self._observers:
            observer.close()


@contextlib.asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks, all of which have ended afterwards; the first error ends the others, and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def make_episode_runner(
    client: GenerateClient,
    media: Reader | None,
    scorers: Scorers | None,
    *,
    model: ModelConfig,
    setup: AgentSetup,
    rollout: RolloutConfig,
    seed: int,
    recording: Recording | None = None,
    reward_keys: Sequence[str] = (),
    scores_text_alone: bool = False,
    observers: Sequence[EpisodeObserver] = (),
) -> EpisodeRunner:
    """The episode runner of engines of this process.

    Args:
        client: of the engines.
        media: how prompts with images are read; None where the engines are given text alone.
        scorers: as for EpisodeRunner.
        model: of the policy.
        setup: agents; its reader of images is set here.
        rollout: its trace settings.
        seed: of the run.
        recording, reward_keys, scores_text_alone: as for EpisodeRunner.
        observers: beside those that rollout.trace asks for.

    Raises:
        ValueError: something that agents or observers need cannot be had here.
    """
    setup.images = None if media is None else media.image_encoder()
    return EpisodeRunner(
        client,
        setup.tokenizer,
        scorers,
        seed=seed,
        setup=setup,
        observers=(*observers, *episode_observers(rollout, setup.tokenizer)),
        recording=recording,
        reward_keys=reward_keys,
        scores_text_alone=scores_text_alone,
        workers=agent_workers(setup, client, model, scorers, seed=seed),
    )


def agent_workers(
    setup: AgentSetup, client: GenerateClient, model: ModelConfig, scorers: Scorers | None, *, seed: int
) -> AgentWorkers | None:
    """The processes that agent.num_workers asks for, not started; None for 0.

    Args:
        setup, client, scorers, seed: as for EpisodeRunner.
        model: with the tokenizer.

    Raises:
        ValueError: the model reads images, which stay in one process; or there are no such processes here.
    """
    count = setup.config.num_workers
    if count == 0:
        return None
    if setup.images is not None:
        raise ValueError(
            f"agent.num_workers is {count}, but the model reads images, which agents in other processes cannot be "
            f"shown: set agent.num_workers=0"
        )
    reward = None if scorers is None else scorers.config
    return AgentWorkers(setup, client, model, reward=reward, seed=seed)
