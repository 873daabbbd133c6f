"""Generation without a training run, for `strop eval`, `strop generate` and `strop check`.

The engine that `rollout.engine` names, on the weights of a model folder; or a server somewhere whose weights are not
ours (strop.rollout.openai).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from strop.agents.setup import AgentSetup
from strop.data.config import DataConfig
from strop.engines.model import load_model
from strop.protocol.trajectory import Prompt
from strop.rewards import RewardPool
from strop.rollout.client import EngineClient, GenerateClient
from strop.rollout.config import RolloutConfig
from strop.rollout.engine_group import EngineContext, Generation, check_engine, native_engine
from strop.rollout.registry import NATIVE
from strop.rollout.replicas.client import RolloutClient
from strop.rollout.types import RolloutEngine, Sampling
from strop.rollout.weight_sync.load_weights import loaded
from strop.trainer.config import Config
from strop.trainer.remote_model import OnUsage, RemoteBackend
from strop.trainer.sections import EvalConfig
from strop.trainer.setup import sampling_of
from strop.trainer.threads import set_threads
from strop.utils.gc_freeze import settled
from strop.workers.episodes import Episode
from strop.workers.player import EpisodeRunner, make_episode_runner


class ModelBackend(Protocol):
    """Backend that generates: an engine of ours, or a server with other weights."""

    def configured(self, config: Config) -> AbstractContextManager[Config]:
        """The configuration with a tokenizer of the model that answers in its model.path, while this lasts.

        Raises:
            ValueError: the engine cannot generate with this model.
        """

    def convert_limits(self, data: DataConfig, config: Config) -> DataConfig:
        """The limits of the data in tokens of the backend."""

    def convert_sampling(self, sampling: Sampling, config: Config) -> Sampling:
        """Sampling with its limit in tokens of the backend."""

    def episode_runner(
        self,
        config: Config,
        setup: AgentSetup,
        scorers: RewardPool | None,
        *,
        max_tokens: int,
        seed: int,
        on_usage: OnUsage,
    ) -> AbstractAsyncContextManager[EpisodeRunner]:
        """Episode runner with the model that `configured` gave, while this lasts.

        Args:
            config: as `configured` gives it.
            setup, scorers, seed: as for EpisodeRunner.
            max_tokens: of an answer, as the one who answers counts them.
            on_usage: hears at the end what was asked of a server.

        Raises:
            ValueError: no engine, model or key for it.
        """


def is_remote(config: Config) -> bool:
    """True when a remote model generates."""
    return config.rollout.remote is not None


def model_backend(config: Config) -> ModelBackend:
    """Backend of these settings."""
    return RemoteBackend() if is_remote(config) else _LocalBackend()


async def run_standalone(
    config: Config,
    setup: AgentSetup,
    prompts: Sequence[Prompt],
    scorers: RewardPool,
    *,
    section: EvalConfig | RolloutConfig,
    on_episode: Callable[[Episode], None] = lambda episode: None,
    on_usage: OnUsage = lambda usage: None,
) -> list[Episode]:
    """Every sample of these prompts, scored, in their order.

    Args:
        config: as `configured` gives it.
        setup, scorers: as for EpisodeRunner.
        prompts: each with a uid of its own.
        section: rollout or eval, with the sampling options and the number of samples of each prompt.
        on_episode: called with each sample as it ends.
        on_usage: hears at the end what was asked of a server.

    Raises:
        ValueError: as `ModelBackend.episode_runner`.
    """
    backend, limit = model_backend(config), config.data.max_response_tokens
    async with backend.episode_runner(
        config, setup, scorers, max_tokens=limit, seed=config.trainer.seed, on_usage=on_usage
    ) as runner:
        return await runner.run(
            prompts,
            samples_per_prompt=section.samples_per_prompt,
            sampling=backend.convert_sampling(sampling_of(config, section, setup.tokenizer), config),
            on_episode=on_episode,
        )


@contextlib.asynccontextmanager
async def generation(config: Config) -> AsyncIterator[Generation]:
    """An engine with the weights of model.path, while this lasts; raises as `load_generation`."""
    context = EngineContext(
        model=config.model,
        rollout=config.rollout,
        device=config.resources.device,
        version=0,
        trained=None,
        max_tokens=config.data.max_prompt_tokens + config.data.max_response_tokens,
        logs=None,
        rank=0,
    )
    loaded_generation = await load_generation(context)
    try:
        with settled():
            yield loaded_generation
    finally:
        await loaded_generation.engine.close()


async def load_generation(context: EngineContext) -> Generation:
    """The engine that `rollout.engine` names, with the weights of the model folder: it generates without a trainer.

    An engine in another process gets them as it does in a run, and must give what the model in this process gives.

    Raises:
        ValueError: it cannot be used here.
        SyncCorrupted: it does not compute with these weights.
    """
    if context.rollout.engine == NATIVE:
        policy = load_model(context.model, device=context.device)
        return Generation(engine=native_engine(context, policy), policy=policy, target=None)
    return await loaded(context)


def client_of(engine: RolloutEngine, rollout: RolloutConfig) -> GenerateClient:
    """Client of an engine that `load_generation` gave."""
    if rollout.engine == NATIVE:
        return EngineClient(engine, timeout_s=rollout.timeout_s)
    return RolloutClient([engine], timeout_s=rollout.timeout_s)


class _LocalBackend:
    """ModelBackend of an engine of ours."""

    @contextlib.contextmanager
    def configured(self, config: Config) -> Iterator[Config]:
        check_engine(config.model, config.rollout)
        set_threads(config.resources, config.model)
        yield config

    def convert_limits(self, data: DataConfig, config: Config) -> DataConfig:
        return data

    def convert_sampling(self, sampling: Sampling, config: Config) -> Sampling:
        return sampling

    @contextlib.asynccontextmanager
    async def episode_runner(
        self,
        config: Config,
        setup: AgentSetup,
        scorers: RewardPool | None,
        *,
        max_tokens: int,
        seed: int,
        on_usage: OnUsage,
    ) -> AsyncIterator[EpisodeRunner]:
        async with generation(config) as generated:
            played = make_episode_runner(
                client_of(generated.engine, config.rollout),
                generated.media,
                scorers,
                model=config.model,
                setup=setup,
                rollout=config.rollout,
                seed=seed,
            )
            with contextlib.closing(played):
                yield played
