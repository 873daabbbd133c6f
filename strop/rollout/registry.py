"""Rollout engines of the user's own, by the names that rollout.engine uses.

from strop.rollout.registry import engines

@engines.register("mine")
async def mine(place):            # strop.workers.generation.Place: model folder, settings, version, the trained policy
    return Generation(...)        # strop.workers.generation.Generation: an engine, and what takes its weights
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from strop.base.registry import Registry

BUILT_IN = ("native", "vllm", "sglang", "openai")

engines: Registry[Callable[[Any], Coroutine[Any, Any, Any]]] = Registry(
    "rollout engine of your own (built in are native, vllm, sglang and openai)"
)
"""Makers of engines, in a file of algorithm.extensions."""


def is_known(name: str) -> bool:
    """Built in, or registered in this process."""
    return name in BUILT_IN or name in engines


def check_engine_name(name: str) -> None:
    """Raise a ValueError where no engine has this name, with the known ones."""
    if name not in BUILT_IN:
        engines[name]
