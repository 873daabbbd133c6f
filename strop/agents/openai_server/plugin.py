"""Plugin of openai_agent: the user's function, and the gateway of this process.

Concurrency: the gateway serves on the loop of the episodes, from the first one that plays to the last one, so that
nothing of it outlives that loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.agents.config import AgentConfig
from strop.agents.context import AgentContext
from strop.agents.openai_server.chat_model import ChatModel
from strop.agents.openai_server.errors import ApiError
from strop.agents.openai_server.server import Gateway
from strop.agents.openai_server.session import Session
from strop.agents.openai_server.settings import OPENAI_AGENT, OpenAIAgentConfig
from strop.agents.openai_server.token_source import Sampler
from strop.agents.plugins import AgentPlugin, EpisodeResources
from strop.agents.tools.formats import ToolParser
from strop.agents.tools.templates import ChatTemplate
from strop.utils.user_files import load_user_file

if TYPE_CHECKING:
    from strop.agents.setup import AgentSetup

MODEL_NAME = "policy"
"""Name of the policy in /v1/models; a call may have any other."""


def _load_function(config: OpenAIAgentConfig) -> Callable[..., Any] | None:
    """The user's function that plays; None where none is named.

    Raises:
        ValueError: there is no such file, or it has no such function.
    """
    if not config.path:
        return None
    name = config.path.rpartition(":")[2]
    function = getattr(load_user_file(config.file, setting="agent.openai.path"), name, None)
    if not callable(function):
        raise ValueError(f"agent.openai.path names {config.path!r}, but the file has no function {name!r}")
    user_function: Callable[..., Any] = function
    return user_function


class OpenAIPlugin(AgentPlugin):
    """Resource of an episode: `function` to call, and `open_session` for the calls that it makes."""

    def __init__(self, setup: AgentSetup) -> None:
        """Import the user's file.

        Raises:
            ValueError: there is none, or it has no such function.
        """
        config = setup.config.openai
        if setup.config.default_agent == OPENAI_AGENT and not config.path:
            raise ValueError(
                "agent.default_agent is openai_agent, but agent.openai.path is empty: name the function that plays, "
                "FILE.py:FUNCTION"
            )
        self.function = _load_function(config)
        self._tool_format = setup.config.tool_format
        if self._tool_format != "auto" and config.path:
            ToolParser.get_tool_parser(self._tool_format, setup.tokenizer)  # before an agent asks for it
        self._models: dict[ChatTemplate, ChatModel] = {}
        self._sessions: dict[str, tuple[Session, Sampler]] = {}
        self._gateway = Gateway(self)
        self._address: asyncio.Task[str] | None = None
        self._stack = AsyncExitStack()

    @classmethod
    def load(cls, config: AgentConfig) -> None:
        """Import the user's file.

        Raises:
            ValueError: there is none, or it has no such function.
        """
        _load_function(config.openai)

    def for_episode(self, row: Mapping[str, Any], agent: str) -> EpisodeResources:
        """The plugin, for its own agent."""
        return EpisodeResources(content=self if agent == OPENAI_AGENT else None)

    def check_row(self, row: Mapping[str, Any], agent: str, label: str) -> None:
        """Refuse a row for openai_agent where no function is named."""
        if agent == OPENAI_AGENT and self.function is None:
            raise ValueError(
                f"{label} is for openai_agent, but agent.openai.path is empty: name FILE.py:FUNCTION"
            )

    def model(self, context: AgentContext) -> ChatModel:
        """The policy, as the episodes of one chat template share it."""
        if context.template not in self._models:
            stops = context.sampling.stop_token_ids
            model = ChatModel(
                MODEL_NAME, context.tokenizer, context.template, stops, context.images, self._tool_format
            )
            self._models[context.template] = model
        return self._models[context.template]

    @asynccontextmanager
    async def open_session(self, session: Session, sampler: Sampler) -> AsyncIterator[Endpoint]:
        """Serve a session inside the context."""
        name = secrets.token_hex(8)
        self._sessions[name] = (session, sampler)
        try:
            if self._address is None:
                self._address = asyncio.create_task(self._stack.enter_async_context(self._gateway.serving()))
            address = await asyncio.shield(self._address)
            yield Endpoint(base_url=f"{address}/s/{name}/v1", api_key=f"{self._gateway.token}:{name}")
        finally:
            self.remove(name)
            if not self._sessions and self._address is not None:
                stack, self._stack, self._address = self._stack, AsyncExitStack(), None
                await asyncio.shield(asyncio.ensure_future(stack.aclose()))

    def find(self, name: str) -> tuple[Session, Sampler]:
        """As of Sessions."""
        if name not in self._sessions:
            raise ApiError(403, f"the episode of session {name} has ended", code="session_ended")
        return self._sessions[name]

    def remove(self, name: str) -> None:
        """As of Sessions."""
        self._sessions.pop(name, None)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address and key with which an agent calls its model."""

    base_url: str
    api_key: str
