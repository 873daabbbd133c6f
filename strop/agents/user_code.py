"""Errors of user code on the event loop: they end one episode, never the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from strop.utils.sanitize import described


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Turn `sys.exit()` or an unrequested cancellation inside awaited user code into an ordinary error.

    Raises:
        RuntimeError: one of these was raised; unchanged, it would end the event loop with all its episodes.
        asyncio.CancelledError: this task is cancelled.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError(described(error)) from None
    except (SystemExit, GeneratorExit) as error:
        raise RuntimeError(described(error)) from None
