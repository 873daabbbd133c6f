"""A user that answers the model."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any


class BaseInteraction:
    """A user with a life per episode: start, answer any number of times, finalize.

    One object serves all episodes of a process; state of an episode is kept under its instance id. Async methods
    run on the event loop of the process, where a blocking call holds every episode up; others run in threads, those of
    several episodes at the same time.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Args:
        config: settings from the YAML file; `name` is there too.
        """
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode; the arguments are those of the row, interaction_kwargs. Returns the episode's id."""
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, Mapping[str, Any]]:
        """Answer the model.

        Args:
            instance_id: of the episode.
            messages: the conversation so far; the last one is the model's.
            kwargs: as of start_interaction.

        Returns:
            True when the conversation ends, the user's reply, the reward of the model's answer, and facts about it.
        """
        return True, "", 0.0, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Reward of the whole episode, for interactions that want to compute it in one place."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End of the episode, also of one that failed or was cancelled."""
