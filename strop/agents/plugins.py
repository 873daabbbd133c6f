"""Base class of plugins, which give the agents of a run resources such as tools or an environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.agents.config import AgentConfig
    from strop.agents.setup import AgentSetup
    from strop.agents.tools.parsed_output import AnswerParser
    from strop.rewards.config import RewardConfig


@dataclass(frozen=True, kw_only=True)
class EpisodeResources:
    """Resources that a plugin gives the agent of one episode."""

    content: object = None
    """Attribute of the agent's context under the name of the plugin; None for none."""
    schemas: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools that the model can call, as the prompt shows them."""
    parser: AnswerParser | None = None
    """Reads the calls; None where there is nothing to call."""


class AgentPlugin:
    """One resource of agents; made once per process that plays episodes or shows prompts."""

    def __init__(self, setup: AgentSetup) -> None:
        """Load the files that the settings name.

        Raises:
            ValueError: the sentence says which file or name cannot be used.
        """
        self.load(setup.config)

    @classmethod
    def load(cls, config: AgentConfig) -> None:
        """Import the code that the settings name, before a model or tokenizer is there.

        Raises:
            ValueError: the sentence says which file or name cannot be used.
        """

    def check_row(self, row: Mapping[str, Any], agent: str, label: str) -> None:
        """Refuse a row that names something unknown.

        Args:
            row: of a data set.
            agent: that plays it.
            label: names the row in messages.

        Raises:
            ValueError: the sentence names the row and the value.
        """

    def check_agents(self, agents: Collection[str], split: str) -> None:
        """Refuse loaded code that none of the agents of a split (one at least) uses.

        Raises:
            ValueError: the sentence names the unused setting.
        """

    def for_episode(self, row: Mapping[str, Any], agent: str) -> EpisodeResources:
        """Resources of the agent of a row."""
        return EpisodeResources()

    def start(self, reward: RewardConfig) -> None:
        """Start the processes and servers that episodes need.

        Args:
            reward: that section of the configuration, in which the sandbox is.

        Raises:
            RuntimeError: it cannot be started here.
        """

    def close(self) -> None:
        """Stop whatever `start` started; a second call does nothing."""


def extra_info_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The column extra_info of a row; empty where it has none."""
    extra = row.get("extra_info")
    return extra if isinstance(extra, Mapping) else {}
