"""Inside a run: an agent that knows nothing of strop plays an episode through a client of OpenAI's API.

Concurrency: the function runs in a thread of its own, with a loop of its own where it is async; its calls come in
by HTTP on the loop of the episodes. At the deadline of the episode (agent.timeout_s) its session is closed, so that its
calls are refused, and the thread is told to end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from strop.agents.context import AgentContext, Generate
from strop.gateway.errors import ApiError
from strop.gateway.kit import OpenAIKit
from strop.gateway.samplers import EpisodeSampler
from strop.gateway.server import set_reward
from strop.gateway.session import Session
from strop.tools.threads import answer_in_thread
from strop.trajectory import Prompt, Trajectory

logger = logging.getLogger(__name__)


async def openai_agent(
    prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
) -> Sequence[Trajectory]:
    """The trajectories of all calls that the user's function makes.

    Where it fails because the episode has no tokens left, the episode ends there as others do at that limit.

    Raises:
        Exception: whatever the function raises.
        ValueError: it returned what is no reward.
    """
    kit: OpenAIKit = context.kits["openai"]
    assert kit.function is not None, "rows without it were refused"
    session = Session(kit.model(context), uid=trajectory.uid, sample_index=trajectory.sample_index)
    sampler = EpisodeSampler(generate, context.sampling)
    async with kit.door(session, sampler) as door:
        try:
            returned = await answer_in_thread(
                _played, kit.function, door.base_url, door.api_key, row_of(prompt)
            )
        except Exception:
            if not sampler.is_full or not session.num_sequences:
                raise
            logger.debug("the agent ended with an error after its last token", exc_info=True)
            returned = None
    if returned is not None:
        try:
            set_reward(session, returned)
        except ApiError as error:
            raise ValueError(f"agent.openai.path: what the function returned as {error.message}") from None
    return _ended(session.sequences(), is_full=sampler.is_full)


def _played(function: Callable[..., Any], base_url: str, api_key: str, row: dict[str, Any]) -> Any:
    returned = function(base_url, api_key, row)
    if not inspect.isawaitable(returned):
        return returned

    async def whole() -> Any:
        return await returned

    coroutine: Coroutine[Any, Any, Any] = whole()
    return asyncio.run(coroutine)


def _ended(sequences: tuple[Trajectory, ...], *, is_full: bool) -> tuple[Trajectory, ...]:
    if not is_full or not sequences:
        return sequences
    return (*sequences[:-1], dataclasses.replace(sequences[-1], stop_reason="length"))


def row_of(prompt: Prompt) -> dict[str, Any]:
    """What an agent is told of the row."""
    return {
        **prompt.columns,
        "prompt": [dict(message) for message in prompt.messages],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        "uid": prompt.uid,
    }
