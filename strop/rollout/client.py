"""Generation clients of agents: token ids in, tokens out.

`EngineClient` asks the engine in this process. Engines in processes of their own may be lost while they generate, and
there may be several (strop.rollout.replicas).

Concurrency: one asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from strop.rollout.types import OnToken, RolloutEngine, Sampling, TokenOutput


class GenerateClient(Protocol):
    """The one thing an agent needs of the rollout side; a test passes a scripted one."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """Continue `prompt_ids`; `on_token` hears of each token."""
        ...


class RolloutTimeout(RuntimeError):
    """A generation request took longer than rollout.timeout_s."""


class NoEngine(RuntimeError):
    """No engine is left that could serve a request."""


class EngineClient:
    """Asks an engine in this process, and bounds the time of each request.

    A request may generate for `timeout_s` from its first token on. The time in which it waits for its turn does not
    count; it has its turn when others end, and these have their limits.
    """

    def __init__(self, engine: RolloutEngine, *, timeout_s: float) -> None:
        """Args:
        engine: that stays its owner's to close.
        timeout_s: rollout.timeout_s.
        """
        self._engine, self._timeout_s = engine, timeout_s

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """Continue `prompt_ids`; they may be `MediaTokens`, and `on_token` hears of each token.

        Raises:
            RolloutTimeout: it generated for longer than rollout.timeout_s.
            Exception: whatever the engine raises.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as deadline:

                def hear(token: int, log_prob: float, version: int) -> None:
                    if deadline.when() is None:
                        deadline.reschedule(loop.time() + self._timeout_s)
                    if on_token is not None:
                        on_token(token, log_prob, version)

                return await self._engine.generate(request_id, prompt_ids, sampling, on_token=hear)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise too_slow(request_id, prompt_ids, sampling, timeout_s=self._timeout_s) from None


def too_slow(
    request_id: str, prompt_ids: Sequence[int], sampling: Sampling, *, timeout_s: float
) -> RolloutTimeout:
    """The error of a request that generated for too long."""
    return RolloutTimeout(
        f"generation of {request_id} took longer than rollout.timeout_s = {timeout_s:g} s ({len(prompt_ids)} prompt "
        f"tokens, up to {sampling.max_tokens} new ones); raise the limit or lower data.max_response_tokens"
    )
