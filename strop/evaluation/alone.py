"""Generation without a training run: what `strop eval`, `strop generate` and `strop check` answer with.

The engine that `rollout.engine` names, on the weights of a model folder; or a server somewhere whose weights are not
ours (place "remote model").
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol, cast

from strop.agents.setup import AgentSetup
from strop.base.garbage import settled
from strop.base.guests import joined
from strop.data.config import DataConfig
from strop.engines.flops.threads import set_threads
from strop.evaluation.loading import client_of, load_generation
from strop.rewards import RewardPool
from strop.rollout.types import Sampling
from strop.trainer.config import Config
from strop.workers.generation import Generation, Place, check_engine
from strop.workers.player import Player, make_player

OnUsage = Callable[[Mapping[str, int]], None]
"""Hears at the end what was asked of a server."""


class Answering(Protocol):
    """How a server whose weights are not ours answers: functions like those of this module, for it."""

    def speaking(self, config: Config) -> AbstractContextManager[Config]:
        """The configuration with a tokenizer of the server's in its model.path, while this lasts."""

    def as_spoken(self, data: DataConfig, config: Config) -> DataConfig:
        """The limits of the data in the server's tokens."""

    def sampling_spoken(self, sampling: Sampling, config: Config) -> Sampling:
        """How answers are sampled, with their limit in the server's tokens."""

    def player(
        self,
        config: Config,
        setup: AgentSetup,
        scorers: RewardPool | None,
        *,
        max_tokens: int,
        seed: int,
        on_usage: OnUsage,
    ) -> AbstractAsyncContextManager[Player]:
        """What plays prompts with the server."""


def is_remote(config: Config) -> bool:
    """Somebody else's model answers."""
    return config.rollout.remote is not None


def _answering(config: Config) -> Answering:
    return cast(Answering, joined("remote model", config.rollout.engine))


@contextlib.contextmanager
def speaking(config: Config) -> Iterator[Config]:
    """The configuration with a tokenizer of the model that answers in its model.path, while this lasts.

    Raises:
        ValueError: the engine cannot generate with this model.
    """
    if is_remote(config):
        with _answering(config).speaking(config) as spoken:
            yield spoken
        return
    check_engine(config.model, config.rollout)
    set_threads(config.resources, config.model)
    yield config


def as_spoken(data: DataConfig, config: Config) -> DataConfig:
    """The limits of the data in tokens of the one who answers."""
    return _answering(config).as_spoken(data, config) if is_remote(config) else data


def sampling_spoken(sampling: Sampling, config: Config) -> Sampling:
    """How answers are sampled, with their limit in tokens of the one who answers."""
    return _answering(config).sampling_spoken(sampling, config) if is_remote(config) else sampling


@contextlib.asynccontextmanager
async def generation(config: Config) -> AsyncIterator[Generation]:
    """An engine with the weights of model.path, while this lasts; raises as `load_generation`."""
    place = Place(
        model=config.model,
        rollout=config.rollout,
        device=config.resources.device,
        version=0,
        trained=None,
        max_tokens=config.data.max_prompt_tokens + config.data.max_response_tokens,
        logs=None,
        rank=0,
    )
    made = await load_generation(place)
    try:
        with settled():
            yield made
    finally:
        await made.engine.close()


@contextlib.asynccontextmanager
async def player(
    config: Config,
    setup: AgentSetup,
    scorers: RewardPool | None,
    *,
    max_tokens: int,
    seed: int,
    on_usage: OnUsage = lambda usage: None,
) -> AsyncIterator[Player]:
    """What plays prompts with the model that `speaking` gave, while this lasts.

    Args:
        config: as `speaking` gives it.
        setup, scorers, seed: as for Player.
        max_tokens: of an answer, as the one who answers counts them.
        on_usage: hears at the end what was asked of a server.

    Raises:
        ValueError: no engine, model or key for it.
    """
    if is_remote(config):
        playing = _answering(config).player(
            config, setup, scorers, max_tokens=max_tokens, seed=seed, on_usage=on_usage
        )
        async with playing as remote:
            yield remote
        return
    async with generation(config) as made:
        played = make_player(
            client_of(made.engine, config.rollout),
            made.media,
            scorers,
            model=config.model,
            setup=setup,
            rollout=config.rollout,
            seed=seed,
        )
        with contextlib.closing(played):
            yield played
