"""Kits: what the agents of a run are given, such as tools or an environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.agents.config import AgentConfig
    from strop.agents.setup import AgentSetup


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a kit gives the agent of one episode."""

    content: Any = None
    """Found in the agent's context under the name of the kit; None for nothing."""
    schemas: tuple[Mapping[str, Any], ...] = ()
    """Of what the model can call, as the prompt shows it."""
    parser: Any = None
    """Reads the calls, a strop.agents.tools.parsed_output.AnswerParser; None where there is nothing to call."""


class Kit:
    """Made once per process that plays episodes or shows prompts; a subclass does what it has to do."""

    def __init__(self, setup: AgentSetup) -> None:
        """Load what the settings name.

        Raises:
            ValueError: the sentence says which file or name cannot be used.
        """

    @classmethod
    def load(cls, config: AgentConfig) -> None:
        """Import the code that the settings name, before a model or tokenizer is there.

        Raises:
            ValueError: the sentence says which file or name cannot be used.
        """

    def check_row(self, row: Mapping[str, Any], agent: str, where: str) -> None:
        """Refuse a row that names what there is not.

        Args:
            row: of a data set.
            agent: that plays it.
            where: names the row in messages.

        Raises:
            ValueError: what is wrong with it.
        """

    def check_agents(self, agents: Collection[str], split: str) -> None:
        """Refuse what was loaded and none of the agents of a split, of which there is one at least, has a use for.

        Raises:
            ValueError: what is without use.
        """

    def of_episode(self, row: Mapping[str, Any], agent: str) -> Given:
        """What the agent of a row gets."""
        return Given()

    def start(self, reward: Any) -> None:
        """Start what playing needs.

        Args:
            reward: that section of the configuration, in which the sandbox is.

        Raises:
            RuntimeError: it cannot be started here.
        """

    def close(self) -> None:
        """End what was started; a second call does nothing."""


def extra_info_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The column extra_info of a row; empty where it has none."""
    extra = row.get("extra_info")
    return extra if isinstance(extra, Mapping) else {}
