"""Answers of a model to chats.

Concurrency: one asyncio loop per call of `answer_all`; at most rollout.max_running requests are handed to the
engine at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from strop.agents.config import SINGLE_TURN, AgentConfig
from strop.agents.setup import AgentSetup
from strop.data.chat import Chat, require_chat_template
from strop.data.prompts import encode_prompts
from strop.engines.model_facts import max_positions
from strop.engines.pretrained_config import load_model_config
from strop.engines.tokenizer import load_tokenizer
from strop.protocol.trajectory import Prompt
from strop.rollout.types import Sampling
from strop.trainer.config import Config
from strop.trainer.setup import stop_token_ids
from strop.trainer.standalone import is_remote, model_backend
from strop.workers.episodes import Episode


class Answerer:
    """A model that answers, while it is entered (`with`).

    Args:
        config: model, engine, resources and limits.
        sampling: options of every answer; keys, and stop tokens of the model folder, are filled in here.
        seed: of the random streams: an answer depends on it, the chat's index and the sample's index alone.
    """

    def __init__(self, config: Config, sampling: Sampling, *, seed: int) -> None:
        self._config, self._sampling, self._seed = config, sampling, seed
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Answerer:
        """Load the model, or start its engine.

        Raises:
            ValueError: the model cannot be used.
        """
        with contextlib.ExitStack() as stack:
            backend = model_backend(self._config)
            config = stack.enter_context(backend.configured(self._config))
            self._tokenizer = load_tokenizer(config.model)
            require_chat_template(self._tokenizer)
            stops = stop_token_ids(config.model, self._tokenizer, config.rollout.stop_token_ids)
            max_tokens = self._sampling.max_tokens
            self._sampling = backend.convert_sampling(
                dataclasses.replace(self._sampling, stop_token_ids=stops), config
            )
            self._max_context = None if is_remote(config) else max_positions(load_model_config(config.model))
            self._runner = stack.enter_context(asyncio.Runner())
            setup = AgentSetup(AgentConfig(), self._tokenizer)
            runner = backend.episode_runner(
                config, setup, None, max_tokens=max_tokens, seed=self._seed, on_usage=lambda usage: None
            )
            self._episode_runner = self._runner.run(runner.__aenter__())
            stack.callback(lambda: self._runner.run(runner.__aexit__(None, None, None)))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def answer_all(
        self, chats: Sequence[Chat], *, samples: int = 1, on_done: Callable[[], None] = lambda: None
    ) -> list[Episode]:
        """Answers in the order of the chats, whose numbers are their rows; `on_done` is called as each one ends.

        Raises:
            ValueError: a chat that the template refuses, or that is too long for the model.
            RolloutTimeout: an answer took longer than rollout.timeout_s.
            EndpointFailed: the server gave no answer.
        """
        return self._runner.run(self._answer_all(chats, samples, on_done))

    async def _answer_all(
        self, chats: Sequence[Chat], samples: int, on_done: Callable[[], None]
    ) -> list[Episode]:
        encoded = zip(chats, encode_prompts(self._tokenizer, chats), strict=True)
        prompts = [self._prompt(number, chat, ids) for number, (chat, ids) in enumerate(encoded)]
        slots = asyncio.Semaphore(self._config.rollout.max_running)

        async def answer(prompt: Prompt, sample_index: int) -> Episode:
            async with slots:
                episode = await self._episode_runner.run_episode(prompt, sample_index, self._sampling)
            on_done()
            return episode

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(answer(prompt, sample))
                    for prompt in prompts
                    for sample in range(samples)
                ]
        except ExceptionGroup as errors:  # the first error ended the others
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _prompt(self, number: int, chat: Chat, ids: Sequence[int]) -> Prompt:
        self._check_length(chat, ids)
        return Prompt(
            uid=f"chat-{number}",
            row=number,
            token_ids=tuple(ids),
            messages=tuple(chat.messages),
            data_source="",
            ground_truth=None,
            agent_name=SINGLE_TURN,
        )

    def _check_length(self, chat: Chat, ids: Sequence[int]) -> None:
        num_tokens = len(ids) + self._sampling.max_tokens
        if self._max_context is not None and num_tokens > self._max_context:
            raise ValueError(
                f"{chat.where} has {len(ids)} tokens, and with up to {self._sampling.max_tokens} new ones that is more "
                f"than the {self._max_context} positions of the model; shorten it, or lower --max-tokens"
            )
