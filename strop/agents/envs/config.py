"""Settings of environments, among those of agents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any

from strop.config.sections import section
from strop.utils.user_files import absolute_path

if TYPE_CHECKING:
    from strop.agents.config import AgentConfig

ENV_AGENT = "env_agent"
"""Name of the agent that plays them."""


@section("agent.environment")
class EnvironmentConfig:
    """Environment of env_agent."""

    name: str = ""
    """Environment that env_agent plays: gymnasium, reasoning_gym, verifiers, openenv, a name registered in one of
    agent.files or by an installed package (docs/packages.md), FILE.py:CLASS, or the dotted path of
    a class. A row's extra_info.env_name comes first."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its arguments; those of a row, extra_info.env_kwargs, are added."""

    def __post_init__(self) -> None:
        if self.kwargs and not self.name:
            raise ValueError(
                f"agent.environment.kwargs has {sorted(self.kwargs)[0]!r}, but agent.environment.name is empty: name "
                f"the environment, or remove them"
            )

    @property
    def _file_and_class(self) -> tuple[str, str]:
        """Of a name FILE.py:CLASS; empty for others."""
        file, colon, class_name = self.name.rpartition(":")
        return (file, class_name) if colon and file.endswith(".py") else ("", "")

    def code_references(self) -> Iterator[tuple[str, str, str]]:
        """Code that would be imported, started or contacted: name of the setting, its value, and its file."""
        if not self.name:
            return
        yield "name", self.name, self._file_and_class[0]
        if self.kwargs:  # modules to import, addresses, files, as the environment has it
            yield "kwargs", f"{', '.join(self.kwargs)} (given to {self.name})", ""

    def with_absolute_paths(self) -> EnvironmentConfig:
        """For processes that may have another current directory."""
        file, class_name = self._file_and_class
        return dataclasses.replace(self, name=f"{absolute_path(file)}:{class_name}") if file else self


def check_credit(config: AgentConfig) -> None:
    """Refuse credit per turn where no environment is played, as a ValueError."""
    plays = config.default_agent == ENV_AGENT or config.environment.name
    if config.credit == "turn" and not plays:
        raise ValueError(
            "agent.credit is turn, but no environment is played, and other agents give no reward per answer: set "
            "agent.default_agent=env_agent or agent.environment.name, or remove it"
        )
