"""One call: its choices sampled at the same time, read, and recorded in its session."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strop.agents.openai_server.messages import Call, Message
from strop.agents.openai_server.request import Ask
from strop.agents.openai_server.session import ChatModel, Session
from strop.agents.openai_server.streaming import StreamedText
from strop.agents.openai_server.token_source import Sampler
from strop.agents.tools.parsed_output import CLOSE, OPEN, FunctionCall, ParsedTurn, split_thinking
from strop.rollout.types import TokenOutput

OnText = Callable[[int, str], None]
"""Hears of text as it comes: the choice, and what its answer has grown by."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer to a call."""

    index: int
    prompt_ids: tuple[int, ...]
    """What it answers."""
    message: Message
    reasoning: str
    """The thinking before the answer."""
    output: TokenOutput
    """As it was recorded."""

    @property
    def finish_reason(self) -> str:
        """In OpenAI's words."""
        if self.output.stop_reason == "length":
            return "length"
        return "tool_calls" if self.message.calls else "stop"


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What came of a call."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each; a chat has one."""
    choices: tuple[Choice, ...]
    """Those of the first prompt, then those of the next one."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each once."""
        return sum(map(len, self.prompts))

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(len(choice.output.token_ids) for choice in self.choices)


async def answer(ask: Ask, session: Session, sampler: Sampler, on_text: OnText | None = None) -> Answered:
    """Carry out a call.

    Args:
        ask: what is asked.
        session: that the call belongs to; every choice is recorded in it.
        sampler: where tokens come from.
        on_text: hears of text as it comes; that of answers that may hold calls comes as a whole.

    Raises:
        ApiError: it cannot be served.
    """
    if ask.is_chat:
        prompts = [session.chat_ids(ask.messages, ask.tools)]
    else:
        prompts = [session.text_ids(one) if isinstance(one, str) else one for one in ask.prompts]
    if ask.reads_calls:
        extra = (*ask.options.stop_token_ids, *session.model.parser().stop_token_ids)
        ask = dataclasses.replace(ask, options=dataclasses.replace(ask.options, stop_token_ids=extra))
    session.num_calls += 1
    work = [
        _choose(place, number, prompt_ids, ask, session, sampler, on_text)
        for place, prompt_ids in enumerate(prompts)
        for number in range(ask.options.n)
    ]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:  # the first error ended the other choices
        raise errors.exceptions[0] from None
    return Answered(prompts=tuple(prompts), choices=tuple(task.result() for task in tasks))


async def _choose(
    place: int,
    number: int,
    prompt_ids: tuple[int, ...],
    ask: Ask,
    session: Session,
    sampler: Sampler,
    on_text: OnText | None,
) -> Choice:
    """One answer: `number` among those to the prompt at `place`."""
    model, index = session.model, place * ask.options.n + number
    text = StreamedText(model.tokenizer, ask.options.stop, (OPEN, CLOSE) if ask.is_chat else ())
    begins_in_thinking = ask.is_chat and model.template.profile.begins_in_thinking
    num_told = 0

    def tell(whole: str) -> None:
        nonlocal num_told
        if on_text is not None and len(whole) > num_told:
            on_text(index, whole[num_told:])
            num_told = len(whole)

    def hear(token: int) -> bool:
        if not ask.options.stop and on_text is None:
            return False
        has_stopped = text.add(token)
        if not ask.reads_calls:
            shown = text.shown()
            tell(split_thinking(shown, begins_in_thinking=begins_in_thinking)[1] if ask.is_chat else shown)
        return has_stopped

    output = await sampler.sample(prompt_ids, ask.options, choice=number, hear=hear)
    if text.has_stopped:
        output = _first(output, text.num_tokens)
    parsed, written = await _parts(output, text, ask, model)
    message = Message("assistant", parsed.content, _calls(parsed))
    tell(parsed.content)
    asked = "" if ask.is_chat else ask.prompts[place]
    completed = asked + parsed.content if isinstance(asked, str) and not ask.is_chat else ""
    session.record(
        prompt_ids,
        output,
        message=message,
        asked=ask.messages,
        written_ids=written,
        has_thinking=bool(parsed.reasoning.strip()),
        text=completed,
    )
    return Choice(
        index=index, prompt_ids=prompt_ids, message=message, reasoning=parsed.reasoning, output=output
    )


async def _parts(
    output: TokenOutput, text: StreamedText, ask: Ask, model: ChatModel
) -> tuple[ParsedTurn, Sequence[str | None]]:
    """An answer in its parts, and the ids that the model wrote for its calls; what is no whole call is text."""
    whole = text.text if text.has_stopped else model.text(output.token_ids)
    if not ask.is_chat:
        return ParsedTurn(whole), ()
    begins_in_thinking = model.template.profile.begins_in_thinking
    if ask.reads_calls and not text.has_stopped:
        parsed = await model.parser().parse(
            output.token_ids, ask.tools, begins_in_thinking=begins_in_thinking
        )
        if all(isinstance(call, FunctionCall) for call in parsed.calls):
            return parsed, [call.tool_call_id for call in parsed.calls if isinstance(call, FunctionCall)]
    reasoning, content = split_thinking(whole, begins_in_thinking=begins_in_thinking)
    return ParsedTurn(content, (), reasoning), ()


def _calls(parsed: ParsedTurn) -> tuple[Call, ...]:
    """The calls with ids that no other call has."""
    return tuple(
        Call(f"call_{secrets.token_hex(12)}", call.name, call.arguments)
        for call in parsed.calls
        if isinstance(call, FunctionCall)
    )


def _first(output: TokenOutput, count: int) -> TokenOutput:
    """The output up to the token with which it ended."""
    return TokenOutput(
        token_ids=output.token_ids[:count],
        log_probs=output.log_probs[:count],
        versions=output.versions[:count],
        stop_reason="stop",
    )
