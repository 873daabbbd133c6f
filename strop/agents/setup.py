"""Agents of a run: files loaded, names checked, and the context of each episode."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from strop.agents.builtin import PLUGINS
from strop.agents.config import SINGLE_TURN, AgentConfig
from strop.agents.context import AgentContext
from strop.agents.plugins import AgentPlugin
from strop.agents.registry import check_agent
from strop.agents.tools.images import ImageEncoder
from strop.agents.tools.templates import ChatTemplate
from strop.data.chat import row_template_options
from strop.protocol.trajectory import Prompt
from strop.rollout.types import Sampling
from strop.utils.user_files import load_user_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from strop.rewards.config import RewardConfig

_MAX_TEMPLATES = 64
"""Kept at once: rows may have variables that no other row has."""


class AgentSetup:
    """Made once per process that plays episodes or shows prompts."""

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_options: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        records_routing: bool = False,
    ) -> None:
        """Load everything that the configuration names.

        Args:
            config: agents, their files and tools.
            tokenizer: with the chat template.
            template_options: variables of the template.
            max_prompt_tokens: limit of a prompt; None where unknown.
            records_routing: the engine says with the end of an answer which experts its tokens went to.

        Raises:
            ValueError: the sentence says which file, name or format cannot be used.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.images: ImageEncoder | None = None
        """Reader of the images of agents; None where the model takes text alone, or nothing is played yet."""
        self.template_options = dict(template_options or {})
        self.max_prompt_tokens = max_prompt_tokens
        self.records_routing = records_routing
        self._templates: dict[str, ChatTemplate] = {}
        for name in config.files:
            load_user_file(name, setting="agent.files")
        self.plugins: dict[str, AgentPlugin] = {name: plugin(self) for name, plugin in PLUGINS.items()}
        """Plugins of the run, by name."""
        check_agent(config.default_agent, "agent.default_agent is")

    def template(self, row_options: Mapping[str, Any] | None = None) -> ChatTemplate:
        """The chat template for conversations that go on, with a row's variables of its own."""
        options = {**self.template_options, **(row_options or {})}
        key = json.dumps(options, default=repr)
        if key not in self._templates:
            if len(self._templates) == _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[key] = ChatTemplate(self.tokenizer, options)
        return self._templates[key]

    def agent_of(self, row: Mapping[str, Any]) -> str:
        """Name of the agent that plays a row."""
        return str(row.get("agent_name") or self.config.default_agent)

    def with_agent_and_tools(
        self, rows: Sequence[Mapping[str, Any]], split: str
    ) -> Sequence[Mapping[str, Any]]:
        """The rows of a split, each by `row_with_agent_and_tools`; unchanged where all are single turns.

        Raises:
            ValueError: a row names something unknown, or no row uses a tool or file of the run.
        """
        names = {self.agent_of(row) for row in rows}
        if names:
            for plugin in self.plugins.values():
                plugin.check_agents(names, split)
        if names <= {SINGLE_TURN}:
            return rows
        return [
            self.row_with_agent_and_tools(row, f"{split} row {number}") for number, row in enumerate(rows)
        ]

    def row_with_agent_and_tools(self, row: Mapping[str, Any], label: str) -> dict[str, Any]:
        """A row with its agent and, where the model can call tools, their schemas in the column tools.

        Args:
            row: of a data set.
            label: names it in messages.

        Raises:
            ValueError: the row names an unknown agent, or a plugin refuses it.
        """
        agent = self.agent_of(row)
        check_agent(agent, f"{label} has agent_name")
        result = {**row, "agent_name": agent}
        for plugin in self.plugins.values():
            plugin.check_row(row, agent, label)
        schemas = [
            schema for plugin in self.plugins.values() for schema in plugin.for_episode(row, agent).schemas
        ]
        return {**result, "tools": schemas} if schemas else result

    def context(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        deadline: float,
        keep_deadline: Callable[[], None] = lambda: None,
    ) -> AgentContext:
        """Context for the agent of one episode."""
        row = {**prompt.columns, "extra_info": prompt.extra_info}
        resources = {
            name: plugin.for_episode(row, prompt.agent_name) for name, plugin in self.plugins.items()
        }
        parsers = [resource.parser for resource in resources.values() if resource.parser is not None]
        return AgentContext(
            config=self.config,
            tokenizer=self.tokenizer,
            chat=partial(self.template, row_template_options(prompt.columns, prompt.uid)),
            parser=parsers[0] if parsers else None,
            tool_schemas=tuple(schema for resource in resources.values() for schema in resource.schemas),
            sampling=sampling,
            max_prompt_tokens=self.max_prompt_tokens or len(prompt.token_ids),
            deadline=deadline,
            keep_deadline=keep_deadline,
            images=self.images,
            resources={
                name: resource.content for name, resource in resources.items() if resource.content is not None
            },
        )

    def start(self, reward: RewardConfig) -> None:
        """Start the plugins, such as the sandbox of `reward`, the section of the configuration.

        Raises:
            RuntimeError: it cannot be started here.
        """
        for plugin in self.plugins.values():
            plugin.start(reward)

    def close(self) -> None:
        """Stop the plugins; a second call does nothing."""
        for plugin in self.plugins.values():
            plugin.close()
