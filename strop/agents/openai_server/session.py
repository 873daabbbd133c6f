"""One session: its calls as training sequences, with the tokens exactly as they were sampled.

A prompt reuses the tokens of the session: an answer that comes back in a later request keeps the tokens that were
sampled, whatever form the client gave it, and only new messages are encoded. A prompt that extends a sequence
grows it; any other begins a new one: the first call, a context that was rewritten, a second answer to the same prompt.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from strop.agents.openai_server.errors import ApiError, invalid
from strop.agents.openai_server.messages import (
    Call,
    ConversationKey,
    Message,
    as_template,
    conversation_key,
    forms_of,
)
from strop.agents.openai_server.token_bytes import opening_ids
from strop.agents.tools.conversation import CONTINUED
from strop.agents.tools.formats import ToolParser, parser_for_template
from strop.agents.tools.images import ImageEncoder
from strop.agents.tools.parsed_output import AnswerParser
from strop.agents.tools.templates import ChatTemplate, Reply
from strop.protocol.trajectory import Media, MediaTokens, Trajectory, media_of
from strop.rollout.types import TokenOutput
from strop.utils.chat_template import TemplateRefused
from strop.utils.chat_template.answers import answer_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]
MAX_RESPONSES = 1000
MAX_IMAGES = 256
"""Read images that a session remembers beside those of the call."""


class ChatModel:
    """A model of the gateway: name, tokenizer, chat template, tool calls."""

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        stop_token_ids: Sequence[int],
        images: ImageEncoder | None = None,
        tool_format: str = "auto",
    ) -> None:
        """Args:
        name: that clients see.
        tokenizer, template, stop_token_ids: of the model.
        images: puts images into token ids; None where the model takes text alone.
        tool_format: format of tool calls, agent.tool_format; auto: as the chat template writes them.

        Raises:
            ValueError: there is no such format.
        """
        self.name, self.tokenizer, self.template = name, tokenizer, template
        self.stop_token_ids = tuple(stop_token_ids)
        self.images = images
        self._parser: AnswerParser | None = None
        self._shows_tools: bool | None = None
        if tool_format != "auto":
            self._parser = ToolParser.get_tool_parser(tool_format, tokenizer)

    def parser(self) -> AnswerParser:
        """Reads tool calls, in the format of the settings or as the chat template writes them.

        Raises:
            ApiError: the settings name no format, and the template writes no calls, or in a form that is not known.
        """
        if self._parser is None:
            try:
                self._parser = parser_for_template(self.template.profile.call_example, self.tokenizer)
            except ValueError as error:
                raise ApiError(400, f"tools: {error}", param="tools", code="unsupported_parameter") from error
        if self._shows_tools is None:
            self._shows_tools = self.template.profile.shows_tools
            if not self._shows_tools:
                logger.warning(
                    "the chat template does not show tool schemas to the model; describe the tools in the system "
                    "message"
                )
        return self._parser

    @cached_property
    def opening_ids(self) -> tuple[int, ...]:
        """Tokens that the tokenizer writes before a text."""
        return opening_ids(self.tokenizer)

    def text(self, token_ids: Sequence[int]) -> str:
        """The tokens as the text of an answer."""
        return answer_text(self.tokenizer, token_ids)


@dataclass(frozen=True, kw_only=True)
class SampledAnswer:
    """One choice of one call."""

    context_key: ConversationKey
    """The conversation before it."""
    message: Message
    """As sent to the client."""
    token_ids: tuple[int, ...]
    has_thinking: bool


class Session:
    """Records calls; `sequences` returns them as trajectories."""

    def __init__(
        self, model: ChatModel, *, uid: str, sample_index: int = 0, max_tokens: int | None = None
    ) -> None:
        """Args:
        model: that is called.
        uid, sample_index: of the trajectories.
        max_tokens: so many are kept; the oldest sequences are forgotten beyond that. None: all are.
        """
        self.model = model
        self.reward: float | None = None
        """Set by the agent."""
        self.reward_parts: dict[str, Any] = {}
        self.responses: dict[str, tuple[Message, ...]] = {}
        """Of /v1/responses: the conversation up to each of the last MAX_RESPONSES responses, by its id."""
        self.num_calls = self.num_forgotten = 0
        self._uid, self._sample_index, self._max_tokens = uid, sample_index, max_tokens
        self._sequences: list[Trajectory] = []
        self._logs: list[list[dict[str, Any]]] = []
        self._texts: list[str] = []
        self._answers: dict[tuple[Any, ...], list[SampledAnswer]] = {}
        self._recent: deque[SampledAnswer] = deque()
        self._by_call: dict[str, SampledAnswer] = {}
        self._written_ids: dict[str, str] = {}
        self._replies: dict[tuple[Any, ...], Reply] = {}
        self._stop_reason = "stop"
        self._contexts: list[Sequence[Message]] = []
        self._media: dict[bytes, Media] = {}

    # ------------------------------------------------------------------ prompts

    def chat_ids(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Tokens of a conversation up to the header of the next answer, sampled answers with their own tokens.

        Raises:
            ApiError: the chat template refuses it.
        """
        if self.model.images is None and any(message.images for message in messages):
            raise invalid("messages", "have images, and the model takes text alone")
        answers = [
            (number, answer)
            for number, message in enumerate(messages)
            if message.role == "assistant" and (answer := self._find(message, messages[:number])) is not None
        ]
        completed = list(messages)  # clients seldom send back what the model thought
        for number, answer in answers:
            if answer.message.reasoning and not messages[number].reasoning:
                completed[number] = dataclasses.replace(messages[number], reasoning=answer.message.reasoning)
        return self._with_images(self._render_any(completed, answers, tools), messages)

    def _render_any(
        self, messages: Sequence[Message], answers: Sequence[tuple[int, SampledAnswer]], tools: Tools
    ) -> tuple[int, ...]:
        """Rendered in the first form that the template takes.

        Raises:
            ApiError: it takes none.
        """
        refused: TemplateRefused | None = None
        for form in forms_of(messages):
            try:
                return self._render(form, answers, tools)
            except TemplateRefused as error:
                refused = refused or error
        raise ApiError(400, f"messages: {refused}", param="messages", code="invalid_value") from refused

    def _with_images(self, token_ids: tuple[int, ...], messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids with those of the images in their places; they were never among the sampled ones."""
        images = [image for message in messages for image in message.images]
        encoder = self.model.images
        if not images or encoder is None:
            return token_ids
        try:
            for image in images:
                if image not in self._media:
                    if len(self._media) >= MAX_IMAGES:
                        self._media = {
                            other_image: self._media[other_image]
                            for other_image in images
                            if other_image in self._media
                        }
                    self._media[image] = encoder.read(image)
            return encoder.expand(token_ids, [self._media[image] for image in images])
        except ValueError as error:
            raise invalid("messages", str(error)) from error

    def new_text_ids(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, behind those with which the tokenizer opens one, unless it has them."""
        ids, opening = tuple(self.model.template.encode(text)), self.model.opening_ids
        return ids if ids[: len(opening)] == opening else (*opening, *ids)

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt that is text; a recorded beginning keeps its tokens."""
        sequence_index = max(
            (
                number
                for number, text_before in enumerate(self._texts)
                if text_before and text.startswith(text_before)
            ),
            key=lambda number: len(self._texts[number]),
            default=None,
        )
        encode = self.model.template.encode
        if sequence_index is None:
            return self.new_text_ids(text)
        return (*self._sequences[sequence_index].token_ids, *encode(text[len(self._texts[sequence_index]) :]))

    def has_answer_of(self, calls: Sequence[Call]) -> bool:
        """True if the model wrote these calls in one answer."""
        answers = [self._by_call.get(call.id) for call in calls]
        return answers[0] is not None and all(answer is answers[0] for answer in answers)

    def _find(self, message: Message, messages_before: Sequence[Message]) -> SampledAnswer | None:
        """The answer that a message of the assistant repeats."""
        for call in message.calls:
            answer = self._by_call.get(call.id)
            if answer is not None and answer.message.key == message.key:
                return answer
        candidates = self._answers.get(message.key, [])
        context_key = conversation_key(messages_before) if len(candidates) > 1 else ()
        return next(
            (candidate for candidate in reversed(candidates) if candidate.context_key == context_key),
            candidates[-1] if candidates else None,
        )

    def _render(
        self, messages: Sequence[Message], answers: Sequence[tuple[int, SampledAnswer]], tools: Tools
    ) -> tuple[int, ...]:
        """Rendered up to the first answer that the template still shows as it was sampled; then answers as they were
        sampled and replies as the template writes them after an answer."""
        template = self.model.template
        ends = [*(number for number, _ in answers[1:]), len(messages)][: len(answers)]
        pieces: list[tuple[int, ...]] = []
        start, has_thinking = (answers[0][0] if answers else len(messages)), False
        for (number, answer), end in zip(answers, ends, strict=True):
            has_thinking = has_thinking or answer.has_thinking
            piece = self._render_turn(
                messages[number:end], answer, tools, messages[0].role == "system", has_thinking
            )
            pieces.append(piece)
            if not piece:
                pieces, start, has_thinking = [], end, False
        head = as_template(messages[:start], template, self._written_ids)
        return template.prompt_ids(head, tools) + tuple(token for piece in pieces for token in piece)

    def _render_turn(
        self,
        messages: Sequence[Message],
        answer: SampledAnswer,
        tools: Tools,
        has_system: bool,
        has_thinking: bool,
    ) -> tuple[int, ...]:
        """An answer and the replies to it; empty where the template rewrites earlier messages by then."""
        template = self.model.template
        replies = as_template(messages, template, self._written_ids)[1:]
        if not replies or replies[0]["role"] == "assistant":
            return ()
        if any(
            template.profile.rewrites_history(
                str(reply["role"]), has_system=has_system, has_thinking=has_thinking
            )
            for reply in replies
        ):
            return ()
        cache_key = (answer.token_ids[-1], *messages, json.dumps(tools, sort_keys=True))
        if cache_key not in self._replies:  # each call has those of all earlier turns
            self._replies[cache_key] = template.reply(
                replies,
                call_names=[template.as_plain_text(call.name) for call in answer.message.calls],
                tools=tools,
                last_id=answer.token_ids[-1],
                stop_ids=self._stop_ids(tools),
            )
        reply = self._replies[cache_key]
        return () if reply.ends_otherwise else (*answer.token_ids, *reply.token_ids)

    def _stop_ids(self, tools: Tools) -> frozenset[int]:
        extra = self.model.parser().stop_token_ids if tools else ()
        return frozenset([*self.model.stop_token_ids, *extra])

    # ------------------------------------------------------------------ records

    def keep_response(self, identity: str, conversation: tuple[Message, ...]) -> None:
        """The conversation that a later request of /v1/responses may go on with."""
        self.responses[identity] = conversation
        while len(self.responses) > MAX_RESPONSES:
            self.responses.pop(next(iter(self.responses)))

    def record(
        self,
        prompt_ids: Sequence[int],
        output: TokenOutput,
        *,
        message: Message,
        context: Sequence[Message] = (),
        written_ids: Sequence[str | None] = (),
        has_thinking: bool = False,
        text: str = "",
    ) -> None:
        """Record a sampled answer.

        Args:
            prompt_ids: tokens before it.
            output: tokens, log-probs and versions.
            message: as sent to the client.
            context: the conversation before it.
            written_ids: of its calls, where the model wrote ids.
            has_thinking: it thought before it answered.
            text: of a completion: prompt and answer.
        """
        self._stop_reason = "stop"
        if output.stop_reason == "length":
            self._stop_reason = "max_tokens" if output.is_own_limit else "length"
        if not output.token_ids:
            return
        prompt, media = tuple(prompt_ids), media_of(prompt_ids)
        index, length = None, 0
        for number, sequence in enumerate(self._sequences):
            ids = sequence.token_ids
            is_begun = len(ids) > length and prompt[: len(ids)] == ids
            if is_begun and sequence.media == media[: len(sequence.media)]:
                index, length = number, len(ids)
        if index is None:
            index = len(self._sequences)
            empty = Trajectory(
                uid=self._uid,
                sample_index=self._sample_index,
                prompt_ids=prompt,
                media=media,
                prompt_messages=tuple({"role": item.role, "content": item.content} for item in context),
            )
            self._sequences.append(empty)
            self._logs.append([])
            self._contexts.append(())
            self._texts.append("")
            length = len(prompt)
        added = [
            dataclasses.replace(item, start=item.start - length) for item in media if item.start >= length
        ]
        grown = self._sequences[index].with_given(MediaTokens(prompt[length:], added))
        start = len(grown.response_ids)
        self._sequences[index] = grown.with_sampled(output.token_ids, output.log_probs, output.versions)
        self._texts[index] = text
        self._log_messages(index, message, context, start=start)
        if not text:
            self._remember(message, context, output, written_ids, has_thinking)
        self._forget()

    def _remember(
        self,
        message: Message,
        context: Sequence[Message],
        output: TokenOutput,
        written_ids: Sequence[str | None],
        has_thinking: bool,
    ) -> None:
        answer = SampledAnswer(
            context_key=conversation_key(context),
            message=message,
            token_ids=output.token_ids,
            has_thinking=has_thinking,
        )
        self._answers.setdefault(message.key, []).append(answer)
        self._recent.append(answer)
        for call, written_id in zip(message.calls, written_ids, strict=True):
            self._by_call[call.id] = answer
            if written_id:
                self._written_ids[call.id] = written_id

    def _log_messages(self, index: int, message: Message, context: Sequence[Message], *, start: int) -> None:
        """Log messages with roles and spans of response tokens, for people."""
        log, response = self._logs[index], self._sequences[index].response_ids
        reply_start = log[-1]["tokens"][1] if log else 0
        is_prompt_of_row = index == 0 and not log  # which samples have beside their messages
        # Another choice of the same request, whose messages stand in the log of the first one.
        is_other_choice = any(context is logged for logged in self._contexts)
        self._contexts[index] = context
        replies = () if is_prompt_of_row or is_other_choice else context[_last_answer(context) + 1 :]
        for reply in replies:
            log.append({"role": reply.role, "content": reply.content, "tokens": [reply_start, start]})
        entry: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.reasoning:
            entry["reasoning"] = message.reasoning
        if message.calls:
            entry["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
        log.append({**entry, "tokens": [start, len(response)]})

    def _forget(self) -> None:
        """Make room where there is a limit: for sequences, and for answers that may come back."""
        if self._max_tokens is None:
            return
        while len(self._sequences) > 1 and _size(self._sequences) > self._max_tokens:
            for column in (self._sequences, self._logs, self._contexts, self._texts):
                column.pop(0)
            self.num_forgotten += 1
        while len(self._recent) > 1 and _size(self._recent) > self._max_tokens:
            oldest = self._recent.popleft()
            self._answers[oldest.message.key].remove(oldest)
            for call in oldest.message.calls:
                self._by_call.pop(call.id, None)
                self._written_ids.pop(call.id, None)
            self._replies.clear()

    @property
    def num_sequences(self) -> int:
        """So far."""
        return len(self._sequences)

    def sequences(self) -> tuple[Trajectory, ...]:
        """The training sequences in the order in which they began; the last one has the facts of the session."""
        if not self._sequences:
            return ()
        log = [
            {**entry, "sequence": number} for number, entries in enumerate(self._logs) for entry in entries
        ]
        *earlier, last = self._sequences
        last = dataclasses.replace(
            last,
            messages=tuple(log),
            num_turns=sum(entry["role"] != "system" for entry in log) + 1,
            reward_score=self.reward,
            extra={"reward_parts": self.reward_parts} if self.reward_parts else {},
            numbers={"model_calls": float(self.num_calls)},
        )
        return (*(sequence.finish(CONTINUED) for sequence in earlier), last.finish(self._stop_reason))


def _last_answer(messages: Sequence[Message]) -> int:
    """Index of the last message of the assistant; -1 for none."""
    return max((number for number, message in enumerate(messages) if message.role == "assistant"), default=-1)


def _size(items: Iterable[Trajectory | SampledAnswer]) -> int:
    """Tokens in all of them."""
    return sum(len(item.token_ids) for item in items)
