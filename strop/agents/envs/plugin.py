"""Check of a run's environments before the first episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strop.agents.config import AgentConfig
from strop.agents.envs.config import ENV_AGENT
from strop.agents.envs.loading import choose_environment, find_environment
from strop.agents.plugins import AgentPlugin

if TYPE_CHECKING:
    from strop.agents.setup import AgentSetup


class EnvironmentPlugin(AgentPlugin):
    """Checks environments; it has no resource, since env_agent creates the environment of its row."""

    def __init__(self, setup: AgentSetup) -> None:
        super().__init__(setup)
        self._config = setup.config.environment

    @classmethod
    def load(cls, config: AgentConfig) -> None:
        """Find the one that the settings name.

        Raises:
            ValueError: there is none of this name.
        """
        if name := config.environment.name:
            find_environment(name)

    def check_row(self, row: Mapping[str, Any], agent: str, label: str) -> None:
        """Refuse a row with an unknown environment, or one that rows may not name."""
        if agent == ENV_AGENT:
            choice = choose_environment(row, name=self._config.name, kwargs=self._config.kwargs, label=label)
            find_environment(choice.name, is_of_row=choice.is_of_row)
