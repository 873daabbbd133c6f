"""Parsed answers of the model: thinking, content, and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class FunctionCall:
    """A call that the model wrote, not yet checked against any tool."""

    name: str
    arguments: str
    """JSON text, as the model wrote it where its format is JSON."""
    tool_call_id: str | None = None


@dataclass(frozen=True)
class MalformedCall:
    """Text that begins as a call and is none; answered with the problem."""

    text: str
    """As written."""
    problem: str
    """A sentence for the model."""
    name: str = ""
    """Of the tool, where it can be read."""


@dataclass(frozen=True)
class ParsedTurn:
    """One answer in its parts."""

    content: str
    """Without thinking and calls."""
    calls: tuple[FunctionCall | MalformedCall, ...] = ()
    """In the order of the answer."""
    reasoning: str = ""
    """The thinking before the answer proper."""


class AnswerParser(Protocol):
    """Reads the parts of an answer from its tokens."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end an answer with calls, beside those of the model."""
        ...

    async def parse(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], *, begins_in_thinking: bool
    ) -> ParsedTurn:
        """The parts.

        Args:
            token_ids: of the answer.
            tools: schemas of the tools.
            begins_in_thinking: the prompt ended with <think>.
        """
        ...


def split_thinking(text: str, *, begins_in_thinking: bool) -> tuple[str, str]:
    """Split an answer into thinking and content.

    Calls are parsed in the content alone: a call in the thinking is not made.

    Args:
        text: of an answer.
        begins_in_thinking: the prompt ended with <think>.
    """
    thinking, closed, answer = text.rpartition(CLOSE)
    if closed:
        return thinking.partition(OPEN)[2] if OPEN in thinking else thinking, answer
    if begins_in_thinking:
        return text, ""
    content_before, opened, open_thinking = text.partition(OPEN)
    return (open_thinking, content_before) if opened else ("", text)


def places_after_thinking(text: str, *, begins_in_thinking: bool) -> tuple[int, ...]:
    """Places before the last </think> of an answer at which its thinking may have ended already: where the tag is text,
    such as that of an argument, `split_thinking` takes too much.

    Args:
        text: of an answer.
        begins_in_thinking: the prompt ended with <think>.
    """
    first, last = text.find(CLOSE), text.rfind(CLOSE)
    if first < 0:
        return ()
    places = [] if begins_in_thinking or text.lstrip().startswith(OPEN) else [0]
    return (*places, first + len(CLOSE)) if first < last else tuple(places)
