"""Chat templates of conversations that go on: the tokens that follow an answer, without encoding the answer again.

A template is a program for whole conversations, but an episode grows: the model's tokens stay, and only the text
after them (tool results, user turns, the header of the next answer) is encoded. It is rendered behind a
short made-up conversation whose answer has a mark, and the text behind the mark's end of turn is taken. End of
turn is a control token, so cutting the encoding there does not change the tokens on either side.

Some templates write earlier turns differently once more follow: thinking is dropped, tool schemas move. That is
probed once per model, on examples (`template_probe.py`); such a reply begins a new training sequence
(`conversation.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from strop.agents.tools.template_probe import (
    EXAMPLE_NAME,
    EXAMPLE_TOOL,
    MARK,
    QUESTION,
    REPLY_MARK,
    Message,
    TemplateProfile,
    call_id,
    example_reply,
    find_profile,
    made_up_answers,
)
from strop.utils.chat_template import TemplateRefused, apply_template
from strop.utils.chat_template.answers import end_of_turn, kept_special_ids, special_tokens
from strop.utils.sanitize.control_tokens import ControlText, any_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARS_PER_TOKEN = 100
"""More characters than a token has, but for a few of white space; bounds the text that is encoded."""


@dataclass(frozen=True)
class Reply:
    """Tokens between an answer and the next one."""

    token_ids: tuple[int, ...]
    """Tokens behind those of the answer."""
    ends_otherwise: bool
    """The template ends such an answer with another token than the answer has."""


class ChatTemplate:
    """The chat template of a tokenizer, with the variables of a run."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self.options = dict(options or {})
        """Variables of the template."""
        self._control_text: ControlText | None = None
        self._added_texts = any_of(
            str(added_token) for added_token in getattr(tokenizer, "added_tokens_decoder", {}).values()
        )
        self._shows_images: dict[int, bool] = {}
        added = set(getattr(tokenizer, "added_tokens_decoder", ()))
        self.control_ids: frozenset[int] = frozenset(added | set(getattr(tokenizer, "all_special_ids", ())))
        """Tokens of their own, at which text is divided before it is encoded."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, opens_answer: bool
    ) -> str:
        """Text of a conversation.

        Raises:
            TemplateRefused: it knows no such conversation.
            TemplateTooCostly: it does not end.
        """
        try:
            text = apply_template(
                self._tokenizer,
                messages,
                list(tools) if tools else None,
                add_generation_prompt=opens_answer,
                tokenize=False,
                **self.options,
            )
        except TemplateRefused as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise TemplateRefused(f"the chat template cannot render messages of {roles}: {error}") from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; none is added."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> tuple[int, ...]:
        """A conversation from its beginning, with the header of the next answer."""
        return tuple(self.encode(self.render(messages, tools, opens_answer=True)))

    def reply(
        self,
        replies: Sequence[Message],
        *,
        call_names: Sequence[str],
        tools: Sequence[Message] | None,
        last_id: int,
        stop_ids: Collection[int],
    ) -> Reply:
        """Tokens between an answer, as it was sampled, and the first token of the next one.

        Args:
            replies: to it, in the form of the template (`reply_messages`).
            call_names: tools that the answer called, in order.
            tools: schemas that the conversation began with.
            last_id: last token of the answer.
            stop_ids: tokens that end an answer.

        Raises:
            TemplateRefused: the template has no place for these replies.
        """
        # also those of loops that write their own
        replies = [self.as_plain_message(message) for message in replies]
        call_names = [self.as_plain_text(name) for name in call_names]
        refused: Exception | None = None
        ends = self.ends_of_turns(stop_ids)
        ids = [str(message["tool_call_id"]) for message in replies if message.get("tool_call_id")]
        if len(ids) != len(call_names):
            ids = self.call_ids(call_names)
        for answer in made_up_answers(list(zip(ids, call_names, strict=True)), self.profile.no_content):
            try:
                tail = self._tail([QUESTION, answer], replies, tools, ends)
            except TemplateRefused as error:
                refused = error
                continue
            if tail is not None:
                has_ended = last_id in ends and bool(tail)
                is_same = has_ended and tail[0] == last_id
                is_other = has_ended and not is_same and tail[0] in self.control_ids
                return Reply(tuple(tail[1:] if is_same else tail), is_other)
        raise refused or TemplateRefused(
            f"the chat template does not show a reply of role {replies[0]['role']!r} after an answer"
        )

    def ends_of_turns(self, stop_ids: Collection[int]) -> frozenset[int]:
        """Tokens, of those at which generation stops, that end a turn: the one that the template writes, and special
        ones. Others, such as `</search>`, are part of the answer, and the turn has yet to be ended behind them."""
        return self._possible_ends.intersection(stop_ids)

    @cached_property
    def _possible_ends(self) -> frozenset[int]:
        """Control tokens that end a turn where generation stops at them; of a large vocabulary, so made once."""
        special = frozenset(special_tokens(self._tokenizer).values()) - kept_special_ids(self._tokenizer)
        return self.control_ids & (special | {end_of_turn(self._tokenizer)})

    def call_ids(self, names: Sequence[str], written: Sequence[str | None] = ()) -> list[str]:
        """Ids of the calls of an answer: those that the model wrote, where the template takes them, or made-up ones."""
        example_ids = [
            f"functions.{name}:{number}" if self.profile.ids_name_tools else call_id(number)
            for number, name in enumerate(names)
        ]
        ids = [
            identity if identity and identity == self.as_plain_text(identity) else example_ids[number]
            for number, identity in enumerate(written)
        ]
        if not ids or ids == example_ids:
            return example_ids
        replies = [example_reply("tool", identity, name) for identity, name in zip(ids, names, strict=True)]
        for answer in made_up_answers(list(zip(ids, names, strict=True)), self.profile.no_content):
            if "tool_calls" in answer and self._try([QUESTION, answer, *replies], [EXAMPLE_TOOL]):
                return ids
        return example_ids

    def _tail(
        self,
        prompt: Sequence[Message],
        replies: Sequence[Message],
        tools: Sequence[Message] | None,
        stop_ids: Collection[int],
    ) -> list[int] | None:
        """Token ids from the end of turn of the marked answer on; None where answer or reply is not shown."""
        marked = [{**replies[0], "content": REPLY_MARK}, *replies[1:]]
        text = self.render([*prompt, *replies], tools, opens_answer=True)
        probe = self.render([*prompt, *marked], tools, opens_answer=True)
        reply_at = probe.find(REPLY_MARK)
        mark_at = probe.rfind(MARK, 0, max(reply_at, 0))
        if mark_at < 0 or reply_at < 0 or text[:reply_at] != probe[:reply_at]:
            return None
        num_before = _count(self.encode(text[:mark_at]), stop_ids)
        if _count(self.encode(text[:reply_at]), stop_ids) > num_before:
            ids = self.encode(text)
            ends = [index for index, token in enumerate(ids) if token in stop_ids]
            return ids[ends[num_before] :]
        # Nothing marks the end of a turn: cut where the text of the answer alone ends.
        alone = self.render(prompt, tools, opens_answer=False)
        end = mark_at
        while end < min(len(alone), reply_at) and alone[end] == text[end]:
            end += 1
        for match in self._added_texts.finditer(
            text, mark_at
        ):  # tokens that differ may begin with the same characters
            if match.start() < end < match.end():
                end = match.start()
        return self.encode(text[end:])

    def as_plain_text(self, text: str) -> str:
        """The text, without control tokens that it spells out (`ControlText`)."""
        if self._control_text is None:
            self._control_text = ControlText(self._tokenizer)
        return self._control_text.as_plain_text(text)

    def as_plain_message(self, message: Message) -> dict[str, Any]:
        """A message from outside, whose texts make no control tokens."""
        return {key: self._as_plain(value) for key, value in message.items()}

    def _as_plain(self, value: object) -> Any:
        if isinstance(value, str):
            return self.as_plain_text(value)
        if isinstance(value, Mapping):
            return {key: self._as_plain(item) for key, item in value.items()}
        return [self._as_plain(item) for item in value] if isinstance(value, list) else value

    def reply_messages(
        self,
        results: Sequence[tuple[str, str, str]],
        *,
        role: str = "tool",
        num_images: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        """Messages of tool results (call id, tool, text), as the template knows them.

        With `num_images` (of each result, or none at all) contents have parts: the images, and then the text.
        """
        counts = num_images or [0] * len(results)
        if role == "tool" and self.profile.reply_role == "tool":
            return [
                {
                    "role": "tool",
                    "tool_call_id": self.as_plain_text(call_id),
                    "name": self.as_plain_text(name),
                    "content": self._content([(count, text)]),
                }
                for (call_id, name, text), count in zip(results, counts, strict=True)
            ]
        texts = [f"{name}: {text}" if name else text for _, name, text in results]
        return [{"role": "user", "content": self._content(list(zip(counts, texts, strict=True)))}]

    def _content(self, pieces: Sequence[tuple[int, str]]) -> str | list[dict[str, str]]:
        """Numbers of images and texts, in order: as text where there is no image."""
        if not any(count for count, _ in pieces):
            return self.as_plain_text("\n".join(text for _, text in pieces))
        parts: list[dict[str, str]] = []
        for number, (count, text) in enumerate(pieces):
            parts += [{"type": "image"}] * count
            line = text + ("\n" if number < len(pieces) - 1 else "")
            parts += [{"type": "text", "text": self.as_plain_text(line)}] if line else []
        return parts

    def shows_images(self, token_id: int) -> bool:
        """True when a reply to an answer can have images, each of which becomes one token of this id."""
        if token_id not in self._shows_images:
            replies = self.reply_messages([(call_id(0), EXAMPLE_NAME, "x")], num_images=[2])
            try:
                ids = self.reply(
                    replies,
                    call_names=[EXAMPLE_NAME],
                    tools=[EXAMPLE_TOOL],
                    last_id=-1,
                    stop_ids=self.control_ids,
                ).token_ids
            except TemplateRefused:
                ids = ()
            self._shows_images[token_id] = ids.count(token_id) == 2
        return self._shows_images[token_id]

    @cached_property
    def profile(self) -> TemplateProfile:
        """Properties of the template, from rendering examples."""
        return find_profile(self._try, self._cuts)

    def _try(self, messages: Sequence[Message], tools: Sequence[Message] | None, opens: bool = True) -> str:
        """The rendered text; empty when the template refuses."""
        try:
            return self.render(messages, tools, opens_answer=opens)
        except TemplateRefused:
            return ""

    def _cuts(self, text: str) -> list[int]:
        """Positions where tokens of their own begin."""
        return [match.start() for match in self._added_texts.finditer(text)]


def _count(ids: Sequence[int], counted: Collection[int]) -> int:
    return sum(token in counted for token in ids)
