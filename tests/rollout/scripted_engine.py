"""An engine that does what a test says."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from strop.protocol.routed_experts import RoutedExperts
from strop.rollout.types import Ability, OnToken, Sampling, StopReason, TokenOutput

EXPERTS = RoutedExperts(num_layers=1, num_chosen=1, tokens=(b"\0\0", b"\1\0"))
"""What engines that are `recording` say of experts."""

Say = Callable[[OnToken, Sampling], Awaitable[TokenOutput]]


class ScriptedEngine:
    """An engine that does what the test says: `say` gives tokens through `hear`, and returns the answer."""

    def __init__(self, say: Say | None = None, *, version: int = 0) -> None:
        self.say = say
        self.version = version
        self.asked: list[tuple[str, tuple[int, ...], Sampling]] = []
        self.ended: list[str] = []
        self.numbers: Mapping[str, float] | Exception = {}
        self.num_probes = 0

    abilities: frozenset[Ability] = frozenset()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        self.asked.append((request_id, tuple(prompt_ids), sampling))
        assert on_token is not None
        try:
            if self.say is None:
                await asyncio.Event().wait()
            assert self.say is not None
            return await self.say(on_token, sampling)
        finally:
            self.ended.append(request_id)

    async def health(self) -> Mapping[str, float]:
        self.num_probes += 1
        if isinstance(self.numbers, Exception):
            raise self.numbers
        return self.numbers

    async def abort(self, request_ids: Sequence[str] | None = None) -> None: ...
    async def set_version(self, version: int) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def flush_cache(self) -> None: ...
    async def sleep(self, level: Literal[1, 2] = 1) -> None: ...
    async def wake_up(self, tags: object = None) -> None: ...
    async def close(self) -> None: ...


def output(*token_ids: int, stop_reason: StopReason = "length") -> TokenOutput:
    """Tokens whose log-prob is minus their id."""
    log_probs = tuple(-float(token) for token in token_ids)
    return TokenOutput(
        token_ids=token_ids, log_probs=log_probs, versions=(0,) * len(token_ids), stop_reason=stop_reason
    )


async def counting(hear: OnToken, sampling: Sampling) -> TokenOutput:
    """Tokens position, position + 1, ...: what an undisturbed engine says."""
    whole = output(*range(sampling.position, sampling.position + sampling.max_tokens))
    for token in whole.token_ids:
        hear(token, -float(token), 0)
        await asyncio.sleep(0)
    return whole


async def recording(hear: OnToken, sampling: Sampling) -> TokenOutput:
    """As counting, with a record of experts."""
    return dataclasses.replace(await counting(hear, sampling), routed_experts=EXPERTS)


def dying(engine: ScriptedEngine, after: int) -> Say:
    """As counting, but the engine ends after so many tokens."""

    async def say(hear: OnToken, sampling: Sampling) -> TokenOutput:
        for token in range(sampling.position, sampling.position + after):
            hear(token, -float(token), 0)
        engine.numbers = ConnectionError("its process is gone")
        raise ConnectionError("the connection was cut")

    return say
