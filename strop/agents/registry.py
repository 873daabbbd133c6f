"""The agents that a dataset row or a configuration can name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from strop.rollout.types import TokenOutput
from strop.trajectory import Prompt, Trajectory

Generate = Callable[[Sequence[int]], Awaitable[TokenOutput]]
"""Continue these token ids; options, random stream and token budget belong to the episode."""

Agent = Callable[[Prompt, Trajectory, Generate], Awaitable[Trajectory]]
"""Plays one episode: (prompt, the empty trajectory of this sample, generate) -> the finished trajectory."""


class AgentRegistry(dict[str, Agent]):
    """Agents by name."""

    def register(self, name: str) -> Callable[[Agent], Agent]:
        """Decorator that makes an agent known under `name`.

        Raises:
            ValueError: another agent has the name.
        """

        def add(agent: Agent) -> Agent:
            if name in self and self[name] is not agent:
                raise ValueError(f"agent {name!r} is already registered: {self[name]!r}")
            self[name] = agent
            return agent

        return add

    def __missing__(self, name: str) -> Agent:
        raise ValueError(f"unknown agent {name!r}; known: {', '.join(sorted(self))}")


agents = AgentRegistry()
