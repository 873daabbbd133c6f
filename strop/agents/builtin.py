"""Built-in agents, and the kits of a run, by name."""

from __future__ import annotations

from collections.abc import Mapping

from strop.agents.envs.agent import env_agent
from strop.agents.envs.kit import EnvironmentKit
from strop.agents.interactions.agent import interaction_agent
from strop.agents.interactions.kit import InteractionKit
from strop.agents.kits import Kit
from strop.agents.openai_server.agent import openai_agent
from strop.agents.openai_server.kit import OpenAIKit
from strop.agents.openrlhf_agents import openrlhf_agent
from strop.agents.registry import agents, register
from strop.agents.tools.agent import tool_agent
from strop.agents.tools.kit import ToolKit
from strop.agents.verl_loops.kit import LoopKit

__all__ = ["KITS", "agents", "register"]

register("interaction_agent")(interaction_agent)
register("tool_agent")(tool_agent)
register("openrlhf_agent")(openrlhf_agent)
register("env_agent")(env_agent)
register("openai_agent")(openai_agent)

KITS: Mapping[str, type[Kit]] = {
    "loops": LoopKit,
    "environments": EnvironmentKit,
    "openai": OpenAIKit,
    "interactions": InteractionKit,
    "tools": ToolKit,
}
"""Kits by the names under which agents find what they give."""
