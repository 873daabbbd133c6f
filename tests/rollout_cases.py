"""Requests against a native engine, with a deadline on everything."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch

from strop.engines.model import CausalLM
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput

T = TypeVar("T")
Ask = tuple[list[int], Sampling]


def run(coroutine: Coroutine[Any, Any, T], *, seconds: float = 30.0) -> T:
    """The coroutine's result; a hang is an error."""

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(bounded())


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
