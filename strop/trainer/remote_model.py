"""A server with OpenAI's API in place of a model folder.

The conversations are bytes (strop.rollout.openai.byte_tokenizer) unless it takes the model's token ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from strop.agents.setup import AgentSetup
from strop.data.config import DataConfig
from strop.rewards import RewardPool
from strop.rollout.openai.byte_tokenizer import BYTES_PER_TOKEN, write_speech_folder
from strop.rollout.openai.client import Endpoint
from strop.rollout.types import Sampling
from strop.trainer.config import Config
from strop.workers.player import EpisodeRunner, agent_workers
from strop.workers.tracing.observer import episode_observers

OnUsage = Callable[[Mapping[str, int]], None]
"""Called at the end with the usage of the server."""
MAX_PROMPT_BYTES = 1 << 24
"""Longest prompt that is sent to a server whose tokens are not known; it says itself what is too long."""


def _is_bytes(config: Config) -> bool:
    return not config.rollout.openai.takes_token_ids


class RemoteBackend:
    """A strop.trainer.standalone.ModelBackend whose model answers behind a URL."""

    @contextlib.contextmanager
    def configured(self, config: Config) -> Iterator[Config]:
        """The configuration with a tokenizer of the server's in its model.path, while this lasts."""
        if not _is_bytes(config):
            yield config
            return
        with tempfile.TemporaryDirectory(prefix="strop-speech-") as folder:
            write_speech_folder(Path(folder))
            yield dataclasses.replace(config, model=dataclasses.replace(config.model, path=folder))

    def convert_limits(self, data: DataConfig, config: Config) -> DataConfig:
        """The limits of the data in the server's tokens."""
        if not _is_bytes(config):
            return data
        return dataclasses.replace(
            data,
            max_prompt_tokens=MAX_PROMPT_BYTES,
            max_response_tokens=data.max_response_tokens * BYTES_PER_TOKEN,
        )

    def convert_sampling(self, sampling: Sampling, config: Config) -> Sampling:
        """Sampling with its limit in the server's tokens."""
        if not _is_bytes(config):
            return sampling
        return dataclasses.replace(sampling, max_tokens=sampling.max_tokens * BYTES_PER_TOKEN)

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
        """Episode runner that generates with the server, while this lasts.

        Args:
            config: as `configured` gives it.
            setup, scorers, seed: as for EpisodeRunner.
            max_tokens: of an answer, as the server counts them.
            on_usage: hears at the end what was asked of it.

        Raises:
            ValueError: there is no key for it.
        """
        endpoint = Endpoint(
            config.rollout.openai,
            setup.tokenizer,
            timeout_s=config.rollout.timeout_s,
            max_tokens=max_tokens,
        )
        endpoint.start()
        try:
            remote = EpisodeRunner(
                endpoint,
                setup.tokenizer,
                scorers,
                seed=seed,
                setup=setup,
                observers=episode_observers(config.rollout, setup.tokenizer),
                max_episodes=endpoint.max_episodes,
                workers=agent_workers(setup, endpoint, config.model, scorers, seed=seed),
            )
            with contextlib.closing(remote):
                yield remote
        finally:
            await endpoint.close()
            on_usage(endpoint.usage)
