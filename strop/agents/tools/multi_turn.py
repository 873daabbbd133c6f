"""Turns of an episode: the model answers, a reply follows, until one of them ends it or a limit is reached.

Agents of several turns differ in the source of the replies alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from strop.agents.context import AgentContext, Generate
from strop.agents.tools.conversation import Conversation
from strop.agents.tools.parsed_output import ParsedTurn, split_thinking
from strop.protocol.trajectory import Media
from strop.rollout.types import TokenOutput
from strop.utils.chat_template.answers import answer_text

MAX_SEQUENCES = 256
"""Training sequences of an episode for which agent.max_assistant_turns gives no limit. Each begins with all that was
before it, so what an episode takes grows with the square of their number, and a model decides how short its answers
are."""


@dataclass(frozen=True, kw_only=True)
class Replies:
    """Replies to an answer: results of tools, or the turn of a user."""

    texts: Sequence[str] = ()
    """The results of the answer's calls, in order, or the one turn of a user."""
    role: str = "user"
    """tool or user."""
    images: Sequence[Sequence[Media]] = ()
    """Of each text, where there are any."""
    facts: Sequence[Mapping[str, Any]] = ()
    """Kept with each text in the sample store."""


class Reply(Protocol):
    """Answers the model."""

    async def __call__(self, turn: ParsedTurn, *, is_last: bool) -> Replies | str:
        """Replies to an answer; a stop reason where the episode is over.

        Args:
            turn: the answer.
            is_last: a limit is reached: the reply will not be shown, so work for it alone can be skipped.
        """
        ...


async def take_turns(
    conversation: Conversation,
    generate: Generate,
    context: AgentContext,
    reply: Reply,
    *,
    answers_stand_alone: bool = False,
) -> str:
    """Alternate answers and replies; returns the stop reason.

    Args:
        conversation: so far; it grows.
        generate: samples an answer.
        context: limits, formats and deadline.
        reply: called after each answer that is complete; one that was cut off ends the episode unanswered.
        answers_stand_alone: each of them will be made a training sequence of its own.

    Returns:
        The stop reason of `reply`, the engine's own reason for an answer that was cut off (`length`, `aborted`),
        `max_assistant_turns`, `max_user_turns`, `timeout` at the deadline of the episode, or `length`
        where a reply would leave no room for another answer; it is not appended then.
    """
    context.keep_deadline()
    try:
        async with asyncio.timeout_at(context.deadline) as deadline:
            return await _turns(conversation, generate, context, reply, answers_stand_alone)
    except TimeoutError:
        if not deadline.expired():
            raise
        return "timeout"


async def _turns(
    conversation: Conversation,
    generate: Generate,
    context: AgentContext,
    reply: Reply,
    answers_stand_alone: bool,
) -> str:
    stops = () if context.parser is None else tuple(context.parser.stop_token_ids)
    num_answers = 0
    while True:
        output = await generate(conversation.token_ids, stop_token_ids=stops, max_tokens=conversation.room)
        num_answers += 1
        turn = await _parse(output, context, begins_in_thinking=conversation.begins_in_thinking)
        conversation.add_answer(output, turn)
        if output.stop_reason != "stop":
            return output.stop_reason
        num_sequences = num_answers if answers_stand_alone else conversation.num_sequences
        limit = _limit(context, num_answers, num_sequences)
        replies = await reply(turn, is_last=bool(limit))
        if isinstance(replies, str):
            return replies
        if limit:
            return limit
        if not conversation.add_replies(
            replies.texts, role=replies.role, images=replies.images, facts=replies.facts
        ):
            conversation.log_left_out(replies.texts, role=replies.role, facts=replies.facts)
            return "length"


def _limit(context: AgentContext, num_answers: int, num_sequences: int) -> str:
    """The limit that so many answers, each but the last with a reply, have reached; empty for none."""
    limits = context.config
    if limits.max_assistant_turns is None and num_sequences >= MAX_SEQUENCES:
        return "max_assistant_turns"
    if limits.max_assistant_turns is not None and num_answers >= limits.max_assistant_turns:
        return "max_assistant_turns"
    if limits.max_user_turns is not None and num_answers > limits.max_user_turns:
        return "max_user_turns"
    return ""


async def _parse(output: TokenOutput, context: AgentContext, *, begins_in_thinking: bool) -> ParsedTurn:
    """The answer without thinking and control tokens, and its calls."""
    if context.parser is not None:
        return await context.parser.parse(
            output.token_ids, context.tool_schemas, begins_in_thinking=begins_in_thinking
        )
    text = answer_text(context.tokenizer, output.token_ids)
    reasoning, content = split_thinking(text, begins_in_thinking=begins_in_thinking)
    return ParsedTurn(content, (), reasoning)
