"""Code of users on the event loop: whatever it raises ends one episode, and no run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from strop.utils.sanitize import described


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """While a user's code is awaited: `sys.exit()` inside, or a cancellation that nobody asked for, is an error like
    others.

    Raises:
        RuntimeError: it was one of them; as they are, they would end the event loop with all its episodes.
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
