"""Rollout engines of the user's own, by the names that rollout.engine uses.

from strop.rollout.registry import engines

@engines.register("mine")
async def mine(context):          # engine_group.EngineContext: model folder, settings, version, the trained policy
    return Generation(...)        # strop.rollout.engine_group.Generation: an engine, and what takes its weights
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from strop.utils.registry import Registry, unknown

NATIVE = "native"
"""The engine in the process of the policy."""
OWN_PROCESSES = ("sglang", "vllm")
"""Engines in processes of their own."""
REMOTE = ("openai",)
"""Servers with a model whose weights are somebody else's."""


def built_in() -> tuple[str, ...]:
    """Names in rollout.engine that need no registration."""
    return (NATIVE, *OWN_PROCESSES, *REMOTE)


engines: Registry[Callable[[Any], Coroutine[Any, Any, Any]]] = Registry(
    "rollout engine", group="strop.rollout_engines"
)
"""Makers of engines, in a file of algorithm.extensions or in an installed package."""


def is_known(name: str) -> bool:
    """Built in, or registered in this process."""
    return name in built_in() or name in engines


def check_engine_name(name: str) -> None:
    """Refuse a name that no engine has, or that one beside the built-in engine has too; an engine of an installed
    package is imported.

    Raises:
        ValueError: the sentence lists the known names, or says what has the name too.
    """
    if name in built_in():
        engines.check_built_in(name)
    elif name in engines:
        engines[name]
    else:
        names = {*built_in(), *engines.names()}
        raise ValueError(unknown(engines.kind, name, names, group=engines.group))
