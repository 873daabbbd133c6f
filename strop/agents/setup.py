"""The agents of a run: files loaded, names checked, and what each episode gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from strop.agents.builtin import KITS
from strop.agents.config import SINGLE_TURN, AgentConfig
from strop.agents.context import AgentContext
from strop.agents.kits import Kit
from strop.agents.registry import check_agent
from strop.agents.tools.templates import ChatTemplate
from strop.protocol.trajectory import Prompt
from strop.rollout.types import Sampling
from strop.utils.user_files import load_user_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AgentSetup:
    """Made once per process that plays episodes or shows prompts."""

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_options: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """Load everything that the configuration names.

        Args:
            config: which agents there are, and what they have.
            tokenizer: with the chat template.
            template_options: variables of the template.
            max_prompt_tokens: of any prompt; None where nobody said.

        Raises:
            ValueError: the sentence says which file, name or format cannot be used.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.images: Any = None
        """Reads images that agents come by; None where the model takes text alone, or nothing is played yet."""
        self.template_options = dict(template_options or {})
        self.max_prompt_tokens = max_prompt_tokens
        self._templates: dict[bool | None, ChatTemplate] = {}
        for name in config.files:
            load_user_file(name, setting="agent.files")
        self.kits: dict[str, Kit] = {name: kit(self) for name, kit in KITS.items()}
        """What agents are given, by name."""
        check_agent(config.default_agent, "agent.default_agent is")

    def template(self, thinking: bool | None = None) -> ChatTemplate:
        """The chat template for conversations that go on, with the row's choice of thinking."""
        if thinking not in self._templates:
            given = self.template_options
            options = given if thinking is None else {**given, "enable_thinking": thinking}
            self._templates[thinking] = ChatTemplate(self.tokenizer, options)
        return self._templates[thinking]

    def agent_of(self, row: Mapping[str, Any]) -> str:
        """Name of the agent that plays a row."""
        return str(row.get("agent_name") or self.config.default_agent)

    def shown_rows(self, rows: Sequence[Mapping[str, Any]], split: str) -> Sequence[Mapping[str, Any]]:
        """The rows of a split as agents need them (`shown_row`); as they are where every one is a single turn.

        Raises:
            ValueError: a row names what there is not, or no row has a use for what the run has.
        """
        names = {self.agent_of(row) for row in rows}
        if names:
            for kit in self.kits.values():
                kit.check_agents(names, split)
        if names <= {SINGLE_TURN}:
            return rows
        return [self.shown_row(row, f"{split} row {number}") for number, row in enumerate(rows)]

    def shown_row(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A row with its agent and, where the model can call something, the schemas of it in the column tools.

        Args:
            row: of a data set.
            where: names it in messages.

        Raises:
            ValueError: the row names what there is not: an unknown agent, or what a kit says.
        """
        agent = self.agent_of(row)
        check_agent(agent, f"{where} has agent_name")
        shown = {**row, "agent_name": agent}
        for kit in self.kits.values():
            kit.check_row(row, agent, where)
        schemas = [schema for kit in self.kits.values() for schema in kit.of_episode(row, agent).schemas]
        return {**shown, "tools": schemas} if schemas else shown

    def context(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        deadline: float,
        keep_deadline: Callable[[], None] = lambda: None,
    ) -> AgentContext:
        """What the agent of one episode gets."""
        row = {**prompt.columns, "extra_info": prompt.extra_info}
        given = {name: kit.of_episode(row, prompt.agent_name) for name, kit in self.kits.items()}
        parsers = [one.parser for one in given.values() if one.parser is not None]
        thinking = prompt.columns.get("enable_thinking")
        return AgentContext(
            config=self.config,
            tokenizer=self.tokenizer,
            chat=partial(self.template, thinking if isinstance(thinking, bool) else None),
            parser=parsers[0] if parsers else None,
            tool_schemas=tuple(schema for one in given.values() for schema in one.schemas),
            sampling=sampling,
            max_prompt_tokens=self.max_prompt_tokens or len(prompt.token_ids),
            deadline=deadline,
            keep_deadline=keep_deadline,
            images=self.images,
            kits={name: one.content for name, one in given.items() if one.content is not None},
        )

    def start(self, reward: Any) -> None:
        """Start what the kits need to play, such as the sandbox of `reward`, the section of the configuration.

        Raises:
            RuntimeError: it cannot be started here.
        """
        for kit in self.kits.values():
            kit.start(reward)

    def close(self) -> None:
        """End what the kits have started; a second call does nothing."""
        for kit in self.kits.values():
            kit.close()
