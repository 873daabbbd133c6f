"""Registry of agents: names that a dataset row or the configuration uses. The built-in ones are added by builtin.py."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any, Protocol

from strop.agents.config import SINGLE_TURN
from strop.agents.context import AgentContext, Generate
from strop.agents.verl_loops.loops import agent_of_class
from strop.protocol.trajectory import Prompt, Trajectory
from strop.utils.registry import Registry

AgentResult = Trajectory | Sequence[Trajectory] | None
"""Result of an agent: one training sequence, several of one episode in order, or None for none."""

__all__ = ["Agent", "AgentRegistry", "AgentResult", "Generate", "agent_named", "agents", "register"]


class Agent(Protocol):
    """Plays one episode: (prompt, the empty trajectory of this sample, generate[, context]) -> AgentResult."""

    def __call__(
        self, prompt: Prompt, trajectory: Trajectory, generate: Generate, /, *context: AgentContext
    ) -> Awaitable[AgentResult]: ...


class AgentRegistry(Registry[Callable[..., Any]]):
    """Agents by name: async functions (prompt, trajectory, generate[, context]), or classes in verl's form."""

    def register(self, name: str | Enum) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that makes an agent known under `name`.

        Raises:
            ValueError: another agent has the name.
            TypeError: it is neither an async function nor a class as verl's loops are.
        """
        add_checked = super().register(name)

        def add(agent: Callable[..., Any]) -> Callable[..., Any]:
            if _as_function(agent) is None:
                raise TypeError(
                    f"agent {name!r} is {agent!r}; register an async function (prompt, trajectory, generate), or a "
                    f"class with `async def run(self, sampling_params, **row)` or `run(self, messages, "
                    "sampling_params)`"
                )
            return add_checked(agent)

        return add


agents = AgentRegistry("agent", group="strop.agents")
register = agents.register
"""Decorator: `@register("name")` over an async function, or over a class in verl's form."""


def _as_function(agent: object) -> Callable[..., Awaitable[AgentResult]] | None:
    """The async function that plays an agent; None where it is none."""
    if inspect.iscoroutinefunction(agent):
        return agent
    return agent_of_class(agent)


@register(SINGLE_TURN)
async def single_turn(prompt: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
    """The simplest agent: one answer to one prompt."""
    output = await generate(prompt.token_ids)
    answered = trajectory.with_sampled(output.token_ids, output.log_probs, output.versions)
    return answered.finish(output.stop_reason)


def agent_named(name: str) -> tuple[Callable[..., Awaitable[AgentResult]], bool]:
    """The async function that plays the agent of this name, and whether it takes a context after the other arguments.

    Raises:
        ValueError: there is no such agent.
    """
    agent = _as_function(agents[name])
    assert agent is not None, "only agents are registered"
    parameters = inspect.signature(agent).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return agent, len(positional) > 3 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def check_agent(name: str, label: str) -> None:
    """Refuse the name of an unknown agent, once the user's files are loaded; one of an installed package is imported.

    Args:
        name: of an agent.
        label: names the setting or row, such as `agent.default_agent is`.

    Raises:
        ValueError: there is no such agent, and the sentence lists the known ones; or its package cannot be used.
    """
    if name not in agents:
        raise ValueError(f"{label} {name!r}, but no agent has that name; known: {', '.join(agents.names())}")
    agents[name]
