"""Settings of interactions, among those of agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INTERACTION_AGENT = "interaction_agent"
"""Name of the agent that talks with them."""


@dataclass(frozen=True, kw_only=True)
class InteractionSettings:
    interactions: str = ""
    """YAML file with interactions: users that answer the model in episodes of interaction_agent."""

    def __post_init__(self) -> None:
        agent: Any = self
        if agent.default_agent == INTERACTION_AGENT and not self.interactions:
            raise ValueError(
                "agent.default_agent is interaction_agent, but there are no interactions: name their file with "
                "agent.interactions"
            )
