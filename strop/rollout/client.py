"""What agents talk to: token ids in, tokens out, within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from strop.rollout.types import RolloutEngine, Sampling, TokenOutput


class GenerateClient(Protocol):
    """The one thing an agent needs of the rollout side; a test passes a scripted one."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> TokenOutput:
        """Continue `prompt_ids`."""
        ...


class RolloutTimeout(RuntimeError):
    """A generation request took longer than rollout.timeout_s."""


class RolloutClient:
    """Routes requests to an engine and bounds their time."""

    def __init__(self, engine: RolloutEngine, *, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> TokenOutput:
        """Continue `prompt_ids`.

        Raises:
            RolloutTimeout: the engine did not answer in time; the request was aborted.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await self._engine.generate(request_id, prompt_ids, sampling)
        except TimeoutError:
            if not deadline.expired():
                raise  # the engine's own
            await self._engine.abort([request_id])
            raise RolloutTimeout(
                f"generation of {request_id} took longer than rollout.timeout_s = {self._timeout_s} s "
                f"({len(prompt_ids)} prompt tokens, up to {sampling.max_tokens} new ones); raise the limit or lower "
                f"data.max_response_tokens"
            ) from None
