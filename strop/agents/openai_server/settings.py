"""Settings of openai_agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from strop.config.sections import section
from strop.utils.user_files import absolute_path

OPENAI_AGENT = "openai_agent"
"""Name of the agent that plays them."""


@section("agent.openai")
class OpenAIAgentConfig:
    """Function of openai_agent."""

    path: str = ""
    """FILE.py:FUNCTION: a function (base_url, api_key, row), async or not, that plays an episode with a client of
    OpenAI's API. What it returns is its reward: a number, {"reward": number, "parts": {...}}, or nothing: then the
    reward function is asked, unless the agent has posted one."""

    def __post_init__(self) -> None:
        file, colon, function = self.path.rpartition(":")
        if self.path and not (colon and file.endswith(".py") and function.isidentifier()):
            raise ValueError(f"agent.openai.path is {self.path!r}; write FILE.py:FUNCTION")

    @property
    def file(self) -> str:
        """The file that it names."""
        return self.path.rpartition(":")[0]

    def code_references(self) -> Iterator[tuple[str, Any, str]]:
        """Code that would be imported: name of the setting, its value, and its file."""
        if self.path:
            yield "path", self.path, self.file

    def with_absolute_paths(self) -> OpenAIAgentConfig:
        """For processes that may have another current directory."""
        file, colon, function = self.path.rpartition(":")
        return dataclasses.replace(self, path=f"{absolute_path(file)}:{function}") if colon else self
