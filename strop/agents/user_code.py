"""Code of users on the event loop: whatever it raises ends one episode, and no run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from strop.border import described

T = TypeVar("T")


async def contained(work: Awaitable[T]) -> T:
    """What the work returns; `sys.exit()` inside, or a cancellation that nobody asked for, is an error like others.

    Raises:
        RuntimeError: the work raised one of them; as they are, they would end the event loop with all its episodes.
        asyncio.CancelledError: this task is cancelled.
        Exception: whatever else the work raises.
    """
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError(described(error)) from None
    except (SystemExit, GeneratorExit) as error:
        raise RuntimeError(described(error)) from None
