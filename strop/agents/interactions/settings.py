"""Settings of interactions, among those of agents."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.agents.config import AgentConfig

INTERACTION_AGENT = "interaction_agent"
"""Name of the agent that talks with them."""


def check_interactions(config: AgentConfig) -> None:
    """Refuse an agent that talks with interactions where there are none, as a ValueError."""
    if config.default_agent == INTERACTION_AGENT and not config.interactions:
        raise ValueError(
            "agent.default_agent is interaction_agent, but there are no interactions: name their file with "
            "agent.interactions"
        )
