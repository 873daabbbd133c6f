"""Interactions of a run, given to episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strop.agents.config import AgentConfig
from strop.agents.interactions.base import BaseInteraction
from strop.agents.interactions.loading import interaction_classes, interaction_of_row, load_interactions
from strop.agents.interactions.settings import INTERACTION_AGENT
from strop.agents.plugins import AgentPlugin, EpisodeResources, extra_info_of

if TYPE_CHECKING:
    from strop.agents.setup import AgentSetup


class InteractionPlugin(AgentPlugin):
    """Gives an episode every interaction, by name."""

    def __init__(self, setup: AgentSetup) -> None:
        """Load them.

        Raises:
            ValueError: the sentence names the entry of the file.
        """
        path = setup.config.interactions
        self.interactions: dict[str, BaseInteraction] = load_interactions(path) if path else {}

    @classmethod
    def load(cls, config: AgentConfig) -> None:
        """Import their classes.

        Raises:
            ValueError: the sentence names the entry of the file.
        """
        if path := config.interactions:
            interaction_classes(path)

    def check_row(self, row: Mapping[str, Any], agent: str, label: str) -> None:
        """Refuse a row with an unknown interaction."""
        if agent == INTERACTION_AGENT:
            interaction_of_row(extra_info_of(row), self.interactions, label)

    def for_episode(self, row: Mapping[str, Any], agent: str) -> EpisodeResources:
        """All of them."""
        return EpisodeResources(content=self.interactions)
