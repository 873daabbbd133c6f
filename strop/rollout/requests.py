"""Checks of a request before any engine takes it, and the one-token request of health checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence

from strop.rollout.types import RolloutEngine, Sampling


async def generate_one_token(
    engine: RolloutEngine, name: str, *, limit_s: float, sentence: Callable[[], str]
) -> None:
    """A request of one token, for real.

    Args:
        engine: that must be able to.
        name: id of the request.
        limit_s: deadline, in seconds.
        sentence: what to say where it passes.

    Raises:
        TimeoutError: no token in time.
        Exception: whatever the engine raises.
    """
    try:
        async with asyncio.timeout(limit_s) as deadline:
            await engine.generate(name, [0], Sampling(key=0, temperature=0.0, max_tokens=1))
    except TimeoutError:
        if not deadline.expired():
            raise
        raise TimeoutError(sentence()) from None


def check_request(
    request_id: str, prompt_ids: Sequence[int], *, vocab_size: int, running: Container[str]
) -> None:
    """Refuse an empty prompt, a token outside the vocabulary, and an id that is already running.

    Raises:
        ValueError: it is one of these.
    """
    if not prompt_ids or min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        raise ValueError(
            f"request {request_id} has {len(prompt_ids)} prompt tokens between {min(prompt_ids, default=0)} and "
            f"{max(prompt_ids, default=0)}, but the model's vocabulary has {vocab_size}; is it the tokenizer of this "
            f"model?"
        )
    if request_id in running:
        raise ValueError(f"request {request_id} is already running; give each request its own id")
