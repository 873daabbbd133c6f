"""One call: its choices sampled at the same time, read, and recorded in its session."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strop.agents.openai_server.chat_model import ChatModel
from strop.agents.openai_server.messages import Call, Message
from strop.agents.openai_server.request import CallRequest
from strop.agents.openai_server.session import Session
from strop.agents.openai_server.streaming import StreamedText
from strop.agents.openai_server.token_source import Sampler
from strop.agents.tools.parsed_output import CLOSE, OPEN, FunctionCall, ParsedTurn, split_thinking
from strop.rollout.types import TokenOutput

OnText = Callable[[int, str], None]
"""Called with new text as it is sampled: index of the choice, and the added text."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer to a call."""

    index: int
    prompt_ids: tuple[int, ...]
    """Tokens that it answers."""
    message: Message
    reasoning: str
    """The thinking before the answer."""
    output: TokenOutput
    """As it was recorded."""

    @property
    def finish_reason(self) -> str:
        """OpenAI's name of the stop reason."""
        if self.output.stop_reason == "length":
            return "length"
        return "tool_calls" if self.message.calls else "stop"


@dataclass(frozen=True, kw_only=True)
class CompletionResult:
    """Result of a call."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each; a chat has one."""
    choices: tuple[Choice, ...]
    """Choices of the first prompt, then those of the next one."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each once."""
        return sum(map(len, self.prompts))

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(len(choice.output.token_ids) for choice in self.choices)


async def answer(
    request: CallRequest, session: Session, sampler: Sampler, on_text: OnText | None = None
) -> CompletionResult:
    """Carry out a call.

    Args:
        request: of the client.
        session: that the call belongs to; every choice is recorded in it.
        sampler: samples the tokens.
        on_text: called with text as it is sampled; that of answers that may have calls comes as a whole.

    Raises:
        ApiError: it cannot be served.
    """
    if request.is_chat:
        prompts = [session.chat_ids(request.messages, request.tools)]
    else:
        prompts = [
            session.text_ids(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts
        ]
    if request.reads_calls:
        extra = (*request.options.stop_token_ids, *session.model.parser().stop_token_ids)
        request = dataclasses.replace(
            request, options=dataclasses.replace(request.options, stop_token_ids=extra)
        )
    session.num_calls += 1
    work = [
        _choose(prompt_index, number, prompt_ids, request, session, sampler, on_text)
        for prompt_index, prompt_ids in enumerate(prompts)
        for number in range(request.options.n)
    ]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as errors:  # the first error ended the other choices
        raise errors.exceptions[0] from None
    return CompletionResult(prompts=tuple(prompts), choices=tuple(task.result() for task in tasks))


async def _choose(
    prompt_index: int,
    number: int,
    prompt_ids: tuple[int, ...],
    request: CallRequest,
    session: Session,
    sampler: Sampler,
    on_text: OnText | None,
) -> Choice:
    """One answer: `number` among those to the prompt at `prompt_index`."""
    model, index = session.model, prompt_index * request.options.n + number
    text = StreamedText(model.tokenizer, request.options.stop, (OPEN, CLOSE) if request.is_chat else ())
    begins_in_thinking = request.is_chat and model.template.profile.begins_in_thinking
    num_sent = 0

    def send(text_so_far: str) -> None:
        nonlocal num_sent
        if on_text is not None and len(text_so_far) > num_sent:
            on_text(index, text_so_far[num_sent:])
            num_sent = len(text_so_far)

    def should_stop(token: int) -> bool:
        if not request.options.stop and on_text is None:
            return False
        has_stopped = text.add(token)
        if not request.reads_calls:
            visible = text.visible_text()
            send(
                split_thinking(visible, begins_in_thinking=begins_in_thinking)[1]
                if request.is_chat
                else visible
            )
        return has_stopped

    output = await sampler.sample(prompt_ids, request.options, choice=number, should_stop=should_stop)
    if text.has_stopped:
        output = _first_tokens(output, text.num_tokens)
    parsed, written = await _parse(output, text, request, model)
    message = Message("assistant", parsed.content, _calls(parsed), reasoning=parsed.reasoning)
    send(parsed.content)
    prompt_text = "" if request.is_chat else request.prompts[prompt_index]
    completed = prompt_text + parsed.content if isinstance(prompt_text, str) and not request.is_chat else ""
    session.record(
        prompt_ids,
        output,
        message=message,
        context=request.messages,
        written_ids=written,
        has_thinking=bool(parsed.reasoning.strip()),
        text=completed,
    )
    return Choice(
        index=index, prompt_ids=prompt_ids, message=message, reasoning=parsed.reasoning, output=output
    )


async def _parse(
    output: TokenOutput, text: StreamedText, request: CallRequest, model: ChatModel
) -> tuple[ParsedTurn, Sequence[str | None]]:
    """A parsed answer, and the ids that the model wrote for its calls; an incomplete call is text."""
    answer_text = text.text if text.has_stopped else model.text(output.token_ids)
    if not request.is_chat:
        return ParsedTurn(answer_text), ()
    begins_in_thinking = model.template.profile.begins_in_thinking
    if request.reads_calls and not text.has_stopped:
        parsed = await model.parser().parse(
            output.token_ids, request.tools, begins_in_thinking=begins_in_thinking
        )
        if all(isinstance(call, FunctionCall) for call in parsed.calls):
            return parsed, [call.tool_call_id for call in parsed.calls if isinstance(call, FunctionCall)]
    reasoning, content = split_thinking(answer_text, begins_in_thinking=begins_in_thinking)
    return ParsedTurn(content, (), reasoning), ()


def _calls(parsed: ParsedTurn) -> tuple[Call, ...]:
    """The calls with ids that no other call has."""
    return tuple(
        Call(f"call_{secrets.token_hex(12)}", call.name, call.arguments)
        for call in parsed.calls
        if isinstance(call, FunctionCall)
    )


def _first_tokens(output: TokenOutput, count: int) -> TokenOutput:
    """The output up to the token with which it ended."""
    return TokenOutput(
        token_ids=output.token_ids[:count],
        log_probs=output.log_probs[:count],
        versions=output.versions[:count],
        stop_reason="stop",
    )
