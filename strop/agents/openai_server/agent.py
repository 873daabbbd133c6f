"""openai_agent: an agent without any code of strop plays an episode through a client of OpenAI's API.

Concurrency: the function runs in a thread of its own, with a loop of its own where it is async; its calls come in
by HTTP on the loop of the episodes. At the deadline of the episode (agent.timeout_s) its session is closed, so that its
calls are refused, and the thread is told to end.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.agents.context import AgentContext, Generate
from strop.agents.openai_server.errors import ApiError
from strop.agents.openai_server.plugin import OpenAIPlugin
from strop.agents.openai_server.server import set_reward
from strop.agents.openai_server.session import Session
from strop.agents.openai_server.token_source import EpisodeSampler
from strop.agents.tools.threads import answer_in_thread
from strop.protocol.trajectory import Prompt, Trajectory

logger = logging.getLogger(__name__)


async def openai_agent(
    prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
) -> Sequence[Trajectory]:
    """The trajectories of all calls that the user's function makes.

    Where it fails because the episode has no tokens left, the episode ends there as others do at that limit.

    Raises:
        Exception: whatever the function raises.
        ValueError: it returned something else than a reward.
    """
    plugin: OpenAIPlugin = context.resources["openai"]
    assert plugin.function is not None, "rows without it were refused"
    session = Session(plugin.model(context), uid=trajectory.uid, sample_index=trajectory.sample_index)
    sampler = EpisodeSampler(generate, context.sampling)
    async with plugin.open_session(session, sampler) as endpoint:
        try:
            returned = await answer_in_thread(
                _call_function, plugin.function, endpoint.base_url, endpoint.api_key, row_of(prompt)
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
    return _with_stop_reason(session.sequences(), is_full=sampler.is_full)


def _call_function(function: Callable[..., Any], base_url: str, api_key: str, row: dict[str, Any]) -> Any:
    returned = function(base_url, api_key, row)
    if not inspect.isawaitable(returned):
        return returned

    async def whole() -> Any:
        return await returned

    coroutine: Coroutine[Any, Any, Any] = whole()
    try:
        return asyncio.run(coroutine)
    except RuntimeError as error:
        if "event loop" not in str(error).lower():
            raise
        raise RuntimeError(
            f"{error}; an async function has an event loop of its own in each episode: make async clients inside it"
        ) from error


def _with_stop_reason(sequences: tuple[Trajectory, ...], *, is_full: bool) -> tuple[Trajectory, ...]:
    if not is_full or not sequences:
        return sequences
    return (*sequences[:-1], dataclasses.replace(sequences[-1], stop_reason="length"))


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The row of a prompt, as an agent gets it; images stand in its messages as clients send them, as data: URLs."""
    images = iter([_data_url(item.parts[0]) for item in prompt.media if item.kind == "image"])
    return {
        **prompt.columns,
        "prompt": [
            _with_images(message, images) if prompt.media else dict(message) for message in prompt.messages
        ],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        "uid": prompt.uid,
    }


def _with_images(message: Mapping[str, Any], urls: Iterator[str]) -> dict[str, Any]:
    """A message with the next images in place of `<image>` and of parts of type image."""
    content = message.get("content")
    parts: list[Any] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
        if part.get("type") == "image":
            parts.append({"type": "image_url", "image_url": {"url": next(urls)}})
            continue
        for number, text in enumerate(str(part.get("text", "")).split("<image>")):
            if number:
                parts.append({"type": "image_url", "image_url": {"url": next(urls)}})
            parts += [{"type": "text", "text": text}] if text else []
    has_images = any(part["type"] == "image_url" for part in parts)
    return {**message, "content": parts} if has_images else dict(message)


def _data_url(part: bytes | str) -> str:
    """An encoded image, or the file of one, as a data: URL."""
    data = part if isinstance(part, bytes) else Path(part).read_bytes()
    kind = next((name for start, name in _IMAGE_KINDS.items() if data.startswith(start)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


_IMAGE_KINDS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
