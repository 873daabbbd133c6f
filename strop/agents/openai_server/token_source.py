"""Samplers of a call's tokens: an engine, or an episode of a run."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from strop.agents.context import Generate, ShouldStop
from strop.agents.openai_server.errors import ApiError, unsupported
from strop.agents.openai_server.request import Options
from strop.agents.openai_server.scoring import PromptScores
from strop.rollout.types import RolloutEngine, Sampling, TokenOutput
from strop.utils.rng import random_key

if TYPE_CHECKING:
    from strop.agents.openai_server.prompt_scorer import PromptScorer  # with torch

logger = logging.getLogger(__name__)


class Sampler(Protocol):
    """Continues token ids for one choice of a call."""

    async def sample(
        self, prompt_ids: Sequence[int], options: Options, *, choice: int, should_stop: ShouldStop
    ) -> TokenOutput:
        """Sample an answer; tokens may follow the one at which `should_stop` returned True.

        Raises:
            ApiError: the request cannot be served.
        """
        ...

    def score(self, prompts: Sequence[Sequence[int]]) -> list[PromptScores]:
        """Log-probs of each prompt's tokens.

        Raises:
            ApiError: 400, they cannot be scored here.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSampler:
    """Samples with an engine, for `strop serve`."""

    engine: RolloutEngine
    sampling: Sampling
    """Defaults of requests, max_tokens included."""
    max_positions: int | None
    """Most tokens of prompt and answer together; None: the model knows no limit."""
    timeout_s: float
    """Of one answer."""
    scorer: PromptScorer | None = None
    """None: the engine's weights are in another process."""

    async def sample(
        self, prompt_ids: Sequence[int], options: Options, *, choice: int, should_stop: ShouldStop
    ) -> TokenOutput:
        """As of Sampler."""
        sampling = self._sampling(len(prompt_ids), options, choice)
        name, aborts = secrets.token_hex(8), set[asyncio.Task[None]]()

        def on_token(token: int, log_prob: float, version: int) -> None:
            if should_stop(token) and not aborts:
                aborts.add(asyncio.get_running_loop().create_task(self.engine.abort([name])))

        try:
            async with asyncio.timeout(self.timeout_s):
                output = await self.engine.generate(name, prompt_ids, sampling, on_token=on_token)
        except TimeoutError:
            raise ApiError(
                504,
                f"the answer took longer than {self.timeout_s:g} s; lower max_tokens, or raise rollout.timeout_s",
            ) from None
        except ValueError as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        finally:
            for task in aborts:
                task.cancel()
        if output.stop_reason == "aborted" and not aborts:
            raise ApiError(503, "the engine ended the request; send it again")
        own_limit = options.max_tokens
        is_cut = output.stop_reason == "length" and len(output.token_ids) >= sampling.max_tokens
        return dataclasses.replace(output, is_own_limit=is_cut and own_limit is not None)

    def score(self, prompts: Sequence[Sequence[int]]) -> list[PromptScores]:
        """As of Sampler."""
        if self.scorer is None:
            raise unsupported("echo", "log-probs of prompts are those of rollout.engine=native alone")
        return self.scorer.score(prompts)

    def _sampling(self, num_prompt_tokens: int, options: Options, choice: int) -> Sampling:
        seed = secrets.randbits(63) if options.seed is None else options.seed
        default, room = self.sampling.max_tokens, (self.max_positions or 1 << 30) - num_prompt_tokens + 1
        chosen = {
            name: value
            for name in ("temperature", "top_p", "top_k")
            if (value := getattr(options, name)) is not None
        }
        return dataclasses.replace(
            self.sampling,
            key=random_key(seed, "serve", choice),
            max_tokens=options.max_tokens or max(1, min(default, room)),
            stop_token_ids=tuple({*self.sampling.stop_token_ids, *options.stop_token_ids}),
            **chosen,
        )


class EpisodeSampler:
    """Samples in an episode of a run, with the run's sampling options, random stream and token budget."""

    def __init__(self, generate: Generate, sampling: Sampling) -> None:
        """Args:
        generate: of the episode.
        sampling: of the run.
        """
        self._generate, self._sampling = generate, sampling
        self._has_sampled = False
        self.is_full = False
        """The budget is used up: there was no token left for the last answer."""

    async def sample(
        self, prompt_ids: Sequence[int], options: Options, *, choice: int, should_stop: ShouldStop
    ) -> TokenOutput:
        """As of Sampler."""
        self._warn_of_ignored(options)
        if self.is_full:
            raise ApiError(
                400,
                "the episode has no tokens left (data.max_response_tokens)",
                code="context_length_exceeded",
            )
        output = await self._generate(
            prompt_ids,
            stop_token_ids=options.stop_token_ids,
            max_tokens=options.max_tokens,
            should_stop=should_stop,
        )
        if output.stop_reason == "aborted":
            raise ApiError(503, "generation was aborted")
        self.is_full = not output.token_ids
        if self.is_full and not self._has_sampled:
            raise ApiError(
                400, f"the first prompt of the agent has {len(prompt_ids)} tokens, which leave none for an answer: "
                f"what it has beyond the prompt of the row counts in data.max_response_tokens = "
                f"{self._sampling.max_tokens}; raise it", code="context_length_exceeded",
            )  # fmt: skip
        self._has_sampled = True
        return output

    def score(self, prompts: Sequence[Sequence[int]]) -> list[PromptScores]:
        """As of Sampler."""
        raise unsupported("echo", "prompts are scored by `strop serve`, not in an episode of a run")

    def _warn_of_ignored(self, options: Options) -> None:
        for name in ("temperature", "top_p", "top_k", "seed"):
            requested, run_value = getattr(options, name), getattr(self._sampling, name, None)
            if requested is not None and requested != run_value and name not in _WARNED:
                _WARNED.add(name)
                logger.warning(
                    "an agent asks for %s=%s, which is passed over: what is trained is sampled as the run says "
                    "(rollout.temperature, rollout.top_p, rollout.top_k, trainer.seed)", name, requested
                )  # fmt: skip


_WARNED: set[str] = set()
"""Parameters that were named once in this process."""
