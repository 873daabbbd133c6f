"""The agents that a dataset row or a configuration can name."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from strop.agents.context import AgentContext, Generate
from strop.agents.loops import loop_as_agent
from strop.trajectory import Prompt, Trajectory

Played = Trajectory | Sequence[Trajectory] | None
"""What an agent returns: one training sequence, several of one episode in order, or None for none."""

__all__ = ["Agent", "AgentRegistry", "Generate", "Played", "agents", "play_agent", "register"]


class Agent(Protocol):
    """Plays one episode: (prompt, the empty trajectory of this sample, generate[, context]) -> what was played."""

    def __call__(
        self, prompt: Prompt, trajectory: Trajectory, generate: Generate, /, *context: Any
    ) -> Awaitable[Played]: ...


AnyAgent = TypeVar("AnyAgent", bound=Callable[..., Any])


class AgentRegistry(dict[str, Callable[..., Any]]):
    """Agents by name: async functions (prompt, trajectory, generate[, context]), or loop classes of verl."""

    def register(self, name: str) -> Callable[[AnyAgent], AnyAgent]:
        """Decorator that makes an agent known under `name`.

        Raises:
            ValueError: another agent has the name.
            TypeError: it is neither an async function nor a class with an async method `run`.
        """

        def add(agent: AnyAgent) -> AnyAgent:
            if name in self and self[name] is not agent:
                raise ValueError(f"agent {name!r} is already registered: {self[name]!r}")
            played = getattr(agent, "run", None) if inspect.isclass(agent) else agent
            if not inspect.iscoroutinefunction(played):
                raise TypeError(
                    f"agent {name!r} is {agent!r}; register an async function (prompt, trajectory, generate), or a "
                    f"class with `async def run(self, sampling_params, **row)`"
                )
            self[name] = agent
            return agent

        return add

    def __missing__(self, name: str) -> Callable[..., Any]:
        raise ValueError(f"unknown agent {name!r}; known: {', '.join(sorted(self))}")


agents = AgentRegistry()
register = agents.register
"""Decorator: `@register("name")` over an async function, or over a loop class."""


async def play_agent(
    name: str, prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
) -> Played:
    """Call the agent of this name with as many arguments as it takes."""
    agent = agents[name]
    if inspect.isclass(agent):
        agent = loop_as_agent(agent)
    parameters = inspect.signature(agent).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_context = len(positional) > 3 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    given = (prompt, trajectory, generate, context) if takes_context else (prompt, trajectory, generate)
    played: Played = await agent(*given)
    return played
