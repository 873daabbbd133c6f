"""Answering by itself as a role: a model folder, agents and scorers in one process, without any training.

Concurrency: the worker is called from one thread; inside `play` an asyncio loop runs everything, with the deadlines of
rollout.timeout_s and reward.timeout_s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from strop.agents.config import AgentConfig
from strop.agents.setup import AgentSetup
from strop.controller import Dispatch, Worker, register
from strop.engines.config import ModelConfig
from strop.engines.model import load_model, load_tokenizer
from strop.protocol import DataProto
from strop.rewards import RewardConfig, RewardPool
from strop.rollout.client import EngineClient
from strop.rollout.config import RolloutConfig
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling
from strop.trajectory import Prompt
from strop.workers.player import make_player


class EvaluationWorker(Worker):
    """Answers its share of the prompts with a whole model of its own; the ranks share nothing."""

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        reward: RewardConfig,
        *,
        agent: AgentConfig,
        template_options: Mapping[str, Any],
        max_prompt_tokens: int,
        device: str,
        seed: int,
    ) -> None:
        """Load tokenizer and model; arguments as those of `RolloutWorker`."""
        super().__init__()
        tokenizer = load_tokenizer(model)
        self._policy = load_model(model, device=device)
        self._engine = NativeEngine(
            self._policy, max_running=rollout.max_running, deterministic=rollout.deterministic
        )
        self._setup = AgentSetup(
            agent, tokenizer, template_options=template_options, max_prompt_tokens=max_prompt_tokens
        )
        self._model, self._rollout = model, rollout
        self._pool = RewardPool(reward, tokenizer=model.path, rank=self.rank, count=self.world_size)
        self._seed = seed

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def play(self, prompts: DataProto, samples_per_prompt: int, sampling: Sampling) -> DataProto:
        """Every answer to these prompts, scored.

        Args:
            prompts: column `prompt` of Prompt objects.
            samples_per_prompt: answers to each.
            sampling: options of every answer; key and budget are filled in.

        Returns:
            Column `episode` of Episode, one row per answer in the order of prompts and samples.
        """
        asked: list[Prompt] = list(prompts.non_tensor_batch["prompt"])
        episodes = asyncio.run(self._play(asked, samples_per_prompt, sampling))
        return DataProto.from_dict({}, non_tensors={"episode": episodes})

    async def _play(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: Sampling
    ) -> list[Any]:
        async with self._pool:
            player = make_player(
                EngineClient(self._engine, timeout_s=self._rollout.timeout_s),
                self._policy.media,
                self._pool,
                model=self._model,
                setup=self._setup,
                rollout=self._rollout,
                seed=self._seed,
            )
            try:
                return await player.play(prompts, samples_per_prompt=samples_per_prompt, sampling=sampling)
            finally:
                player.close()
