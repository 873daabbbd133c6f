"""Agent loops of the file agent.loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strop.agents.config import BUILT_IN_AGENTS, AgentConfig
from strop.agents.plugins import AgentPlugin
from strop.agents.registry import agents
from strop.agents.tools.class_loading import load_class, read_yaml
from strop.agents.verl_loops.loops import loop_as_agent


class LoopPlugin(AgentPlugin):
    """Registers the loops of the list as agents."""

    @classmethod
    def load(cls, config: AgentConfig) -> None:
        """Import and register them.

        Raises:
            ValueError: the sentence names the entry of the list.
        """
        path = config.loops
        for name, agent in (loops_from_yaml(path) if path else {}).items():
            if name in BUILT_IN_AGENTS:
                raise ValueError(f"agent.loops names a loop {name!r}, which is built in; choose another name")
            agents[name] = agent


def loops_from_yaml(path: str) -> dict[str, Callable[..., Any]]:
    """Agents of a YAML list: name, _target_ (a loop class) and further constructor arguments.

    Raises:
        ValueError: the sentence names the entry.
    """
    entries = read_yaml(path, setting="agent.loops")
    if not isinstance(entries, list):
        raise ValueError(f"agent.loops: {path} must hold a list of loops with name and _target_")
    loops: dict[str, Callable[..., Any]] = {}
    for number, entry in enumerate(entries, start=1):
        label = f"agent.loops: entry {number} of {path}"
        if not isinstance(entry, Mapping) or "name" not in entry or "_target_" not in entry:
            raise ValueError(f"{label} needs the keys name and _target_")
        settings = {str(key): value for key, value in entry.items() if key not in ("name", "_target_")}
        loop_class = load_class(str(entry["_target_"]), setting=label, folder=Path(path).expanduser().parent)
        loops[str(entry["name"])] = loop_as_agent(loop_class, **settings)
    return loops
