"""Built-in agents and plugins, by name."""

from __future__ import annotations

from collections.abc import Mapping

from strop.agents.envs.agent import env_agent
from strop.agents.envs.plugin import EnvironmentPlugin
from strop.agents.interactions.agent import interaction_agent
from strop.agents.interactions.plugin import InteractionPlugin
from strop.agents.openai_server.agent import openai_agent
from strop.agents.openai_server.plugin import OpenAIPlugin
from strop.agents.openrlhf_agents import openrlhf_agent
from strop.agents.plugins import AgentPlugin
from strop.agents.registry import agents, register
from strop.agents.tools.agent import tool_agent
from strop.agents.tools.plugin import ToolPlugin
from strop.agents.verl_loops.plugin import LoopPlugin

__all__ = ["PLUGINS", "agents", "register"]

register("interaction_agent")(interaction_agent)
register("tool_agent")(tool_agent)
register("openrlhf_agent")(openrlhf_agent)
register("env_agent")(env_agent)
register("openai_agent")(openai_agent)

PLUGINS: Mapping[str, type[AgentPlugin]] = {
    "loops": LoopPlugin,
    "environments": EnvironmentPlugin,
    "openai": OpenAIPlugin,
    "interactions": InteractionPlugin,
    "tools": ToolPlugin,
}
"""Plugins, by the attribute of the agent's context that holds their resource."""
