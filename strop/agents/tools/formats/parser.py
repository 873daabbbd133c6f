"""Formats of tool calls by name, and the parser class that users of verl know."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from strop.agents.tools.formats.calls import ParsedCalls, ToolSchemas
from strop.agents.tools.parsed_output import (
    CLOSE,
    FunctionCall,
    MalformedCall,
    ParsedTurn,
    places_after_thinking,
    split_thinking,
)
from strop.agents.tools.schemas import schema_mapping
from strop.agents.tools.template_probe import CallExample
from strop.utils.chat_template.answers import answer_text
from strop.utils.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A way to write tool calls that is built in."""

    name: str
    read: Callable[[str, ToolSchemas], ParsedCalls]
    """Content and calls of an answer's text, control tokens included, thinking and end of turn excluded."""
    stop_tokens: tuple[str, ...] = ()
    """Control tokens that end an answer with calls, where the vocabulary has them."""
    thinking: Callable[[str], tuple[str, str]] | None = None
    """Splits thinking from the answer proper where it is not written between <think> tags."""


formats: dict[str, ToolFormat] = {}
"""Built-in formats by name, the ones with the most distinctive marks first."""


def add_formats(*tool_formats: ToolFormat) -> None:
    """Register formats."""
    formats.update({tool_format.name: tool_format for tool_format in tool_formats})


class ToolParser:
    """Reads tool calls from the tokens of an answer.

    A parser of one's own is a subclass with `extract_tool_calls`, registered with `@ToolParser.register("name")`
    and named by agent.tool_format.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end an answer with calls, beside those of the model."""
        return []

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: object = None
    ) -> tuple[str, list[FunctionCall]]:
        """Content without calls, and the calls in order."""
        raise NotImplementedError(f"{type(self).__name__} has no method extract_tool_calls")

    async def parse(
        self, token_ids: Sequence[int], tools: ToolSchemas, *, begins_in_thinking: bool = False
    ) -> ParsedTurn:
        """The parts of an answer, malformed calls included where the format tells them."""
        content, calls = await self.extract_tool_calls(list(token_ids), tools)
        thinking, _ = split_thinking(
            str(self.tokenizer.decode(list(token_ids))), begins_in_thinking=begins_in_thinking
        )
        return ParsedTurn(content, tuple(calls), thinking)

    @classmethod
    def register(cls, name: str) -> Callable[[ParserClass], ParserClass]:
        """Decorator that registers a parser class under `name`.

        Raises:
            ValueError: another parser has the name.
        """

        def add(parser: ParserClass) -> ParserClass:
            if name in formats:
                raise ValueError(f"tool format {name!r} is already registered: {formats[name]!r}")
            tool_parsers.register(name)(parser)
            return parser

        return add

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: PreTrainedTokenizerBase) -> ToolParser:
        """The parser of this name for a tokenizer.

        Raises:
            ValueError: there is none.
        """
        if name in formats:
            return FormatParser(formats[name], tokenizer)
        if name in tool_parsers:
            return tool_parsers[name](tokenizer)
        names = ", ".join(sorted({*formats, *tool_parsers.names()}))
        raise ValueError(
            f"unknown tool format {name!r}; known: {names}. Set agent.tool_format to one of them"
        )


ParserClass = TypeVar("ParserClass", bound=type[ToolParser])

tool_parsers: Registry[type[ToolParser]] = Registry("tool format", group="strop.tool_formats")
"""Parsers of formats that users and packages bring, by name."""


class FormatParser(ToolParser):
    """Parser of a format that is built in."""

    def __init__(self, tool_format: ToolFormat, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self.format = tool_format
        vocabulary = tokenizer.get_vocab() if tool_format.stop_tokens else {}
        self._stop_ids = [vocabulary[name] for name in tool_format.stop_tokens if name in vocabulary]
        self._control = {
            index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        } | set(tokenizer.all_special_ids)

    @property
    def stop_token_ids(self) -> list[int]:
        """As of ToolParser."""
        return list(self._stop_ids)

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: object = None
    ) -> tuple[str, list[FunctionCall]]:
        """As of ToolParser; malformed calls are left out."""
        turn = await self.parse(responses_ids, _as_mappings(tools))
        return turn.content, [call for call in turn.calls if isinstance(call, FunctionCall)]

    async def parse(
        self, token_ids: Sequence[int], tools: ToolSchemas, *, begins_in_thinking: bool = False
    ) -> ParsedTurn:
        """As of ToolParser."""
        ids = list(token_ids)
        if ids and (ids[-1] in self._stop_ids or ids[-1] == self.tokenizer.eos_token_id):
            ids.pop()
        turn = self._read(str(self.tokenizer.decode(ids)), tools, begins_in_thinking=begins_in_thinking)
        return replace(turn, content=self._without_control_tokens(turn.content))

    def reads(self, example: CallExample) -> bool:
        """True when this format reads a call that a template writes."""
        for text in example.readings:
            calls = self._read(text, (), begins_in_thinking=False).calls
            call = calls[0] if len(calls) == 1 else None
            if isinstance(call, FunctionCall) and call.name == example.name:
                try:
                    if json.loads(call.arguments) == example.arguments:
                        return True
                except json.JSONDecodeError:
                    continue
        return False

    def _read(self, text: str, tools: ToolSchemas, *, begins_in_thinking: bool) -> ParsedTurn:
        if self.format.thinking is not None:
            reasoning, answer = self.format.thinking(text)
            return self._read_answer(answer, tools, reasoning)
        for start in places_after_thinking(text, begins_in_thinking=begins_in_thinking):
            reasoning, _ = split_thinking(text[:start], begins_in_thinking=begins_in_thinking)
            turn = self._read_answer(text[start:], tools, reasoning)
            arguments = [call.arguments for call in turn.calls if isinstance(call, FunctionCall)]
            if CLOSE not in turn.content and any(CLOSE in text for text in arguments):
                return turn  # an argument spells the tag out, which closes nothing
        reasoning, answer = split_thinking(text, begins_in_thinking=begins_in_thinking)
        return self._read_answer(answer, tools, reasoning)

    def _read_answer(self, answer: str, tools: ToolSchemas, reasoning: str) -> ParsedTurn:
        """The parts of an answer without its thinking."""
        try:
            content, calls = self.format.read(answer, tools)
        except (ValueError, RecursionError, MemoryError) as error:  # nesting that exhausts the reader
            malformed = MalformedCall(answer[:200], f"Tool calls cannot be read: {type(error).__name__}")
            content, calls = "", [malformed]
        return ParsedTurn(content, tuple(calls), reasoning)

    def _without_control_tokens(self, text: str) -> str:
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not self._control.intersection(ids):
            return text
        return answer_text(self.tokenizer, ids)


def parser_for_template(example: CallExample | None, tokenizer: PreTrainedTokenizerBase) -> ToolParser:
    """The parser of the format that reads a call as a chat template writes it.

    Raises:
        ValueError: it writes none, or in a way that is not known.
    """
    for tool_format in formats.values() if example else ():
        parser = FormatParser(tool_format, tokenizer)
        if example and parser.reads(example):
            return parser
    problem = f"writes tool calls as {example.text[:120]!r}" if example else "writes no tool calls"
    raise ValueError(
        f"the chat template {problem}, so how the model calls tools is not known: set agent.tool_format to one of "
        f"{', '.join(sorted({*formats, *tool_parsers.names()}))}, or to a parser of your own "
        f"(@ToolParser.register in a file of agent.files)"
    )


def _as_mappings(tools: Any) -> ToolSchemas:
    """Schemas given as objects or as mappings."""
    return [schema_mapping(tool) for tool in tools or ()]
