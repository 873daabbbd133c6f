"""Answers of a model to chats.

Concurrency: one asyncio loop per call of `answer_all`; at most rollout.max_running requests are handed to the
engine at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from strop.agents.config import SINGLE_TURN, AgentConfig
from strop.agents.setup import AgentSetup
from strop.data.chat import Chat, encode_all, render, require_chat_template
from strop.engines.model import load_model, load_tokenizer
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling
from strop.trainer.config import Config
from strop.trainer.setup import stop_token_ids
from strop.trainer.threads import set_threads
from strop.trajectory import Prompt
from strop.workers.episodes import Episode
from strop.workers.player import make_player


class Answerer:
    """A loaded model with its tokenizer.

    Args:
        config: model, resources and limits.
        sampling: options of every answer; keys, and stop tokens of the model folder, are filled in here.
        seed: of the random streams: an answer depends on it, the chat's index and the sample's index alone.
    """

    def __init__(self, config: Config, sampling: Sampling, *, seed: int) -> None:
        set_threads(config.resources, config.model)
        self._tokenizer = load_tokenizer(config.model)
        require_chat_template(self._tokenizer)
        stops = stop_token_ids(config.model, self._tokenizer, config.rollout.stop_token_ids)
        self._sampling = dataclasses.replace(sampling, stop_token_ids=stops)
        model = load_model(config.model, device=config.resources.device)
        self._max_context = getattr(model.config, "max_position_embeddings", None)  # not every family has it
        self._player = make_player(
            NativeEngine(model, max_running=config.rollout.max_running),
            model,
            self._tokenizer,
            None,
            setup=AgentSetup(AgentConfig(), self._tokenizer),
            timeout_s=config.rollout.timeout_s,
            seed=seed,
        )
        self._max_running = config.rollout.max_running

    async def answer_all(
        self, chats: Sequence[Chat], *, samples: int = 1, on_done: Callable[[], None] = lambda: None
    ) -> list[Episode]:
        """Answers in the order of the chats, whose numbers are their rows; `on_done` is called as each one ends.

        Raises:
            ValueError: a chat that the template refuses, or that is too long for the model.
            RolloutTimeout: an answer took longer than rollout.timeout_s.
        """
        texts = [render(self._tokenizer, chat, add_generation_prompt=True) for chat in chats]
        encoded = zip(chats, encode_all(self._tokenizer, texts), strict=True)
        prompts = [self._prompt(number, chat, ids) for number, (chat, ids) in enumerate(encoded)]
        turns = asyncio.Semaphore(self._max_running)

        async def one(prompt: Prompt, sample_index: int) -> Episode:
            async with turns:
                episode = await self._player.episode(prompt, sample_index, self._sampling)
            on_done()
            return episode

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(prompt, sample)) for prompt in prompts for sample in range(samples)
            ]
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
        wanted = len(ids) + self._sampling.max_tokens
        if self._max_context is not None and wanted > self._max_context:
            raise ValueError(
                f"{chat.where} has {len(ids)} tokens, and with up to {self._sampling.max_tokens} new ones that is more "
                f"than the {self._max_context} positions of the model; shorten it, or lower --max-tokens"
            )
