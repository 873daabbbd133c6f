"""Requests against a native engine, with a deadline on everything."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch

from strop.engines.causal_lm import CausalLM
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput

T = TypeVar("T")
Ask = tuple[list[int], Sampling]


class SteppedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock is the sum of its waits: no wait takes time, and work takes none of the clock's."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = selectors.DefaultSelector()
        select = selector.select

        def at_once(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            assert timeout is not None, "nothing to wait for"
            self._now += timeout
            return select(0)

        selector.select = at_once  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self._now


def run(coroutine: Coroutine[Any, Any, T], *, seconds: float = 30.0, stepped: bool = False) -> T:
    """The coroutine's result; a hang is an error. stepped: by the clock of a SteppedLoop."""

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await coroutine

    with asyncio.Runner(loop_factory=SteppedLoop if stepped else None) as runner:
        return runner.run(bounded())


def tokens(length: int, seed: int, vocab: int = 61) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def turns(count: int) -> None:
    """Let the other tasks of the loop go on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def generate_all(
    engine: NativeEngine, asks: Sequence[Ask], order: Sequence[int] | None = None
) -> list[TokenOutput]:
    """All requests at once, sent in the given order, results in the order of `asks`."""
    outputs: dict[int, TokenOutput] = {}

    async def one(index: int) -> None:
        prompt, sampling = asks[index]
        outputs[index] = await engine.generate(f"request {index}", prompt, sampling)

    async with asyncio.TaskGroup() as group:
        for index in order if order is not None else range(len(asks)):
            group.create_task(one(index))
    return [outputs[index] for index in range(len(asks))]


def answers(
    model: CausalLM, asks: Sequence[Ask], *, max_running: int = 256, order: Sequence[int] | None = None
) -> list[TokenOutput]:
    """What a fresh engine generates."""
    return run(generate_all(NativeEngine(model, max_running=max_running), asks, order))


def token_ids(outputs: Sequence[TokenOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]
