"""One session: its calls as training sequences, with the tokens exactly as they were sampled.

A prompt reuses the tokens of the session: an answer that comes back in a later request keeps the tokens that were
sampled, whatever form the client gave it, and only new messages are encoded. A prompt that extends a sequence
grows it; any other begins a new one: the first call, a context that was rewritten, a second answer to the same prompt.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.agents.openai_server.chat_model import ChatModel
from strop.agents.openai_server.errors import ApiError, invalid
from strop.agents.openai_server.messages import (
    Message,
    as_template,
    conversation_key,
    forms_of,
)
from strop.agents.openai_server.sampled_answers import SampledAnswer, SampledAnswers
from strop.agents.tools.conversation import CONTINUED
from strop.agents.tools.templates import Reply
from strop.protocol.trajectory import Media, MediaTokens, Trajectory, media_of
from strop.rollout.types import TokenOutput
from strop.utils.chat_template import TemplateRefused

logger = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]
MAX_RESPONSES = 1000
MAX_IMAGES = 256
"""Read images that a session remembers beside those of the call."""


@dataclass(kw_only=True)
class _Sequence:
    """One training sequence."""

    trajectory: Trajectory
    log: list[dict[str, Any]] = field(default_factory=list)
    """Messages with roles and spans of response tokens, for people."""
    context: Sequence[Message] = ()
    """Messages of the last request."""
    text: str = ""
    """Of a completion: prompt and answer."""


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
        self.answers = SampledAnswers()
        self.num_calls = self.num_forgotten = 0
        self._uid, self._sample_index, self._max_tokens = uid, sample_index, max_tokens
        self._sequences: list[_Sequence] = []
        self._replies: dict[tuple[Any, ...], Reply] = {}
        self._stop_reason = "stop"
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
            if message.role == "assistant"
            and (answer := self.answers.find(message, messages[:number])) is not None
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
        begun = [sequence for sequence in self._sequences if sequence.text and text.startswith(sequence.text)]
        if not begun:
            return self.new_text_ids(text)
        longest = max(begun, key=lambda sequence: len(sequence.text))
        rest = self.model.template.encode(text[len(longest.text) :])
        return (*longest.trajectory.token_ids, *rest)

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
        head = as_template(messages[:start], template, self.answers.written_ids)
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
        replies = as_template(messages, template, self.answers.written_ids)[1:]
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
        sequence = self._sequence_of(prompt_ids, context)
        start = len(sequence.trajectory.response_ids)
        sequence.trajectory = sequence.trajectory.with_sampled(
            output.token_ids, output.log_probs, output.versions
        )
        sequence.text = text
        self._log_messages(sequence, message, context, start=start)
        if not text:
            answer = SampledAnswer(
                context_key=conversation_key(context),
                message=message,
                token_ids=output.token_ids,
                has_thinking=has_thinking,
            )
            self.answers.add(answer, written_ids)
        self._forget()

    def _sequence_of(self, prompt_ids: Sequence[int], context: Sequence[Message]) -> _Sequence:
        """The longest sequence that the prompt extends, with what it adds; else a new one."""
        prompt, media = tuple(prompt_ids), media_of(prompt_ids)
        longest, length = None, 0
        for sequence in self._sequences:
            ids, pictures = sequence.trajectory.token_ids, sequence.trajectory.media
            is_begun = len(ids) > length and prompt[: len(ids)] == ids
            if is_begun and pictures == media[: len(pictures)]:
                longest, length = sequence, len(ids)
        if longest is None:
            trajectory = Trajectory(
                uid=self._uid,
                sample_index=self._sample_index,
                prompt_ids=prompt,
                media=media,
                prompt_messages=tuple({"role": item.role, "content": item.content} for item in context),
            )
            longest, length = _Sequence(trajectory=trajectory), len(prompt)
            self._sequences.append(longest)
        added = [
            dataclasses.replace(item, start=item.start - length) for item in media if item.start >= length
        ]
        longest.trajectory = longest.trajectory.with_given(MediaTokens(prompt[length:], added))
        return longest

    def _log_messages(
        self, sequence: _Sequence, message: Message, context: Sequence[Message], *, start: int
    ) -> None:
        """Log messages with roles and spans of response tokens, for people."""
        log, response = sequence.log, sequence.trajectory.response_ids
        reply_start = log[-1]["tokens"][1] if log else 0
        is_prompt_of_row = not log and sequence is self._sequences[0]  # samples have it beside their messages
        # Another choice of the same request, whose messages stand in the log of the first one.
        is_other_choice = any(context is other.context for other in self._sequences)
        sequence.context = context
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
        while len(self._sequences) > 1 and self._num_tokens() > self._max_tokens:
            self._sequences.pop(0)
            self.num_forgotten += 1
        if self.answers.forget_beyond(self._max_tokens):
            self._replies.clear()

    def _num_tokens(self) -> int:
        return sum(len(sequence.trajectory.token_ids) for sequence in self._sequences)

    @property
    def num_sequences(self) -> int:
        """So far."""
        return len(self._sequences)

    def sequences(self) -> tuple[Trajectory, ...]:
        """The training sequences in the order in which they began; the last one has the facts of the session."""
        if not self._sequences:
            return ()
        log = [
            {**entry, "sequence": number}
            for number, sequence in enumerate(self._sequences)
            for entry in sequence.log
        ]
        *earlier, last = (sequence.trajectory for sequence in self._sequences)
        last = dataclasses.replace(
            last,
            messages=tuple(log),
            num_turns=sum(entry["role"] != "system" for entry in log) + 1,
            reward_score=self.reward,
            extra={"reward_parts": self.reward_parts} if self.reward_parts else {},
            numbers={"model_calls": float(self.num_calls)},
        )
        return (*(trajectory.finish(CONTINUED) for trajectory in earlier), last.finish(self._stop_reason))


def _last_answer(messages: Sequence[Message]) -> int:
    """Index of the last message of the assistant; -1 for none."""
    return max((number for number, message in enumerate(messages) if message.role == "assistant"), default=-1)
