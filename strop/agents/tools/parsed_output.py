"""Answers of the model in their parts: thinking, what it says, and the calls that it makes."""

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
    """What begins as a call and is none; answered with the problem."""

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
            tools: schemas of what can be called.
            begins_in_thinking: the prompt ended with <think>.
        """
        ...


def split_thinking(text: str, *, begins_in_thinking: bool) -> tuple[str, str]:
    """Thinking, and what follows it.

    Calls are looked for in the second part alone: what a model thinks of doing it has not done.

    Args:
        text: of an answer.
        begins_in_thinking: the prompt ended with <think>.
    """
    thought, closed, answer = text.rpartition(CLOSE)
    if closed:
        return thought.partition(OPEN)[2] if OPEN in thought else thought, answer
    if begins_in_thinking:
        return text, ""
    before, opened, open_thought = text.partition(OPEN)
    return (open_thought, before) if opened else ("", text)
