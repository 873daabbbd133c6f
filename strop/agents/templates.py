"""Chat templates of conversations that go on: which tokens follow an answer, without encoding the answer again.

A template is a program for whole conversations, but an episode grows: the model's tokens stand, and only what
comes after them (tool results, user turns, the header of the next answer) is encoded. It is rendered behind a
short made-up conversation whose answer has a mark, and what stands behind the mark's end of turn is taken. End of
turn is a control token, so where the encoding is cut does not change the tokens on either side.

Some templates write earlier turns differently once more follow: thinking is dropped, tool schemas move. That is
found out once per model, on examples; such a reply begins a new training sequence (`conversation.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2

Message = Mapping[str, Any]

_MARK, _REPLY_MARK, _THOUGHT = "ANSWERMARK", "REPLYMARK", "THOUGHTMARK"
_EXAMPLE_NAME = "look_up"
_EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": _EXAMPLE_NAME,
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "The word."}},
            "required": ["value"],
        },
    },
}
_ANSWER_FORMS = ("calls", "first call", "calls as text", "first call as text", "text")
"""How the answer of the made-up conversation can be given; templates differ in what they accept."""


class TemplateRefused(ValueError):
    """The chat template cannot render these messages."""


@dataclass(frozen=True, kw_only=True)
class TemplateProfile:
    """What a chat template does with conversations that go on."""

    reply_role: str
    """Role of tool results: `tool`, or `user` where the template knows no other."""
    forgets_thinking_at: frozenset[str]
    """Roles of replies after which earlier thinking is no longer shown."""
    rewrites_at: frozenset[str]
    """Roles of replies after which what stands before them is written differently, thinking aside."""
    takes_raw_answers: bool
    """An earlier answer can be given as its text, tool calls included."""
    begins_in_thinking: bool
    """The header of an answer opens the thinking."""
    shows_tools: bool
    """Tool schemas become part of the prompt."""
    call_example: str
    """How the template writes a call of the tool look_up; empty when it writes none."""
    separator: str
    """Text between the end of an answer and a reply to it, which the model does not write itself."""


class ChatTemplate:
    """The chat template of a tokenizer, with the variables of a run."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self.options = dict(options or {})
        """Variables of the template."""
        self._control_texts: re.Pattern[str] | None = None
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
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=opens_answer,
                tokenize=False,
                **self.options,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise TemplateRefused(f"the chat template cannot render messages of {roles}: {error}") from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; none is added."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> tuple[int, ...]:
        """A conversation from its beginning, with the header of the next answer."""
        return tuple(self.encode(self.render(messages, tools, opens_answer=True)))

    def reply_ids(
        self,
        replies: Sequence[Message],
        *,
        call_names: Sequence[str],
        tools: Sequence[Message] | None,
        last_id: int,
        stop_ids: Collection[int],
    ) -> tuple[int, ...]:
        """Tokens between an answer, as it was sampled, and the first token of the next one.

        Args:
            replies: what answers it, in the form of the template (`reply_messages`).
            call_names: tools that the answer called, in order.
            tools: schemas that the conversation began with.
            last_id: last token of the answer.
            stop_ids: tokens that end an answer.

        Raises:
            TemplateRefused: the template has no place for these replies.
        """
        refused: Exception | None = None
        ends = self.control_ids.intersection(stop_ids)
        for form in _ANSWER_FORMS if call_names else ("text",):
            asked = [{"role": "user", "content": "x"}, _answer(form, call_names)]
            try:
                tail = self._tail(asked, replies, tools, ends)
            except TemplateRefused as error:
                refused = error
                continue
            if tail is not None:
                return tuple(tail[1:] if tail and tail[0] == last_id and last_id in ends else tail)
        raise refused or TemplateRefused(
            f"the chat template does not show a reply of role {replies[0]['role']!r} after an answer"
        )

    def _tail(
        self,
        asked: Sequence[Message],
        replies: Sequence[Message],
        tools: Sequence[Message] | None,
        stop_ids: Collection[int],
    ) -> list[int] | None:
        """Token ids from the end of turn of the marked answer on; None where answer or reply is not shown."""
        marked = [{**replies[0], "content": _REPLY_MARK}, *replies[1:]]
        text = self.render([*asked, *replies], tools, opens_answer=True)
        probe = self.render([*asked, *marked], tools, opens_answer=True)
        reply_at = probe.find(_REPLY_MARK)
        at = probe.rfind(_MARK, 0, max(reply_at, 0))
        if at < 0 or reply_at < 0 or text[:reply_at] != probe[:reply_at]:
            return None
        num_before = _count(self.encode(text[:at]), stop_ids)
        if _count(self.encode(text[:reply_at]), stop_ids) > num_before:
            ids = self.encode(text)
            ends = [index for index, token in enumerate(ids) if token in stop_ids]
            return ids[ends[num_before] :]
        # Nothing marks the end of a turn: cut where the text of the answer alone ends.
        alone = self.render(asked, tools, opens_answer=False)
        end = at
        while end < min(len(alone), reply_at) and alone[end] == text[end]:
            end += 1
        return self.encode(text[end:])

    def as_plain_text(self, text: str) -> str:
        """The text with a space in every control token that it spells out, so that none is made of it.

        Tool results come from outside; an end of turn in one must not end the turn.
        """
        if self._control_texts is None:
            added = getattr(self._tokenizer, "added_tokens_decoder", {})
            names = {str(token) for token in added.values() if token.special and len(str(token)) > 1}
            names |= {name for name in getattr(self._tokenizer, "all_special_tokens", []) if len(name) > 1}
            alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
            self._control_texts = re.compile(alternatives or r"(?!)")
        return self._control_texts.sub(lambda found: found[0][0] + " " + found[0][1:], text)

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
                    "tool_call_id": call_id,
                    "name": name,
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
        """Whether a reply to an answer can hold images, each of which becomes one token of this id."""
        if token_id not in self._shows_images:
            replies = self.reply_messages([(call_id(0), _EXAMPLE_NAME, "x")], num_images=[2])
            try:
                ids = self.reply_ids(
                    replies,
                    call_names=[_EXAMPLE_NAME],
                    tools=[_EXAMPLE_TOOL],
                    last_id=-1,
                    stop_ids=self.control_ids,
                )
            except TemplateRefused:
                ids = ()
            self._shows_images[token_id] = ids.count(token_id) == 2
        return self._shows_images[token_id]

    # ------------------------------------------------------------------ found out once

    @cached_property
    def profile(self) -> TemplateProfile:
        """What the template does, from rendering examples."""
        role = "tool" if self._shows_replies("tool") else "user"
        roles = dict.fromkeys((role, "user"))
        header, is_raw = self._header(), self._takes_raw_answers(role)
        return TemplateProfile(
            reply_role=role,
            forgets_thinking_at=frozenset(one for one in roles if self._forgets(one, is_raw)),
            rewrites_at=frozenset(one for one in roles if self._rewrites(one)),
            takes_raw_answers=is_raw,
            begins_in_thinking=header.rstrip().endswith("<think>"),
            shows_tools=_EXAMPLE_NAME in self._try([{"role": "user", "content": "x"}], [_EXAMPLE_TOOL]),
            call_example=self._call_example(header),
            separator=self._separator(),
        )

    def _try(self, messages: Sequence[Message], tools: Sequence[Message] | None, opens: bool = True) -> str:
        """The rendered text; empty when the template refuses."""
        try:
            return self.render(messages, tools, opens_answer=opens)
        except TemplateRefused:
            return ""

    def _header(self) -> str:
        """What opens an answer."""
        asked = [{"role": "user", "content": _MARK}]
        closed, opened = self._try(asked, None, opens=False), self._try(asked, None)
        return opened[len(closed) :] if opened.startswith(closed) else ""

    def _replied(self, role: str, **answer: str) -> str:
        """A conversation in which an answer with these fields was replied to; empty when it is refused."""
        reply = _example_reply(role)
        for form in _ANSWER_FORMS if role == "tool" else ("text",):
            called = _answer(form, [_EXAMPLE_NAME])
            content = answer.get("content", "") + str(called["content"])
            asked = [{"role": "user", "content": "x"}, {**called, **answer, "content": content}]
            text = self._try([*asked, reply], None)
            if _MARK in text and _REPLY_MARK in text:
                return text
        return ""

    def _shows_replies(self, role: str) -> bool:
        return bool(self._replied(role))

    def _forgets(self, role: str, is_raw: bool) -> bool:
        """Thinking before an answer is gone once the answer is replied to, in the form in which answers are given."""
        if is_raw:
            raw = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_MARK}"}
            written = self._try([{"role": "user", "content": "x"}, raw, _example_reply(role)], None)
            return _MARK in written and _THOUGHT not in written
        fields = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        alone = [{"role": "user", "content": "x"}, {**_answer("text", []), **fields}]
        is_known = _THOUGHT in self._try(alone, None, opens=False) or _THOUGHT in self._replied(
            "tool", **fields
        )
        replied = self._replied(role, **fields)
        return is_known and bool(replied) and _THOUGHT not in replied

    def _rewrites(self, role: str) -> bool:
        """What stands before a second reply is not what stood there before it."""
        reply = _example_reply(role)
        for form in _ANSWER_FORMS if role == "tool" else ("text",):
            begun = [{"role": "user", "content": "x"}, _answer(form, [_EXAMPLE_NAME]), reply]
            later = self._try([*begun, _answer(form, [_EXAMPLE_NAME]), reply], [_EXAMPLE_TOOL])
            earlier = self._try(begun, [_EXAMPLE_TOOL], opens=False)
            first = self._try(begun[:1], [_EXAMPLE_TOOL], opens=False)
            if later and earlier:
                return not (later.startswith(earlier) and later.startswith(first))
        return False

    def _takes_raw_answers(self, role: str) -> bool:
        raw = {"role": "assistant", "content": f"{_MARK} <tool_call>"}
        text = self._try([{"role": "user", "content": "x"}, raw, _example_reply(role)], None)
        return _MARK in text and _REPLY_MARK in text

    def _call_example(self, header: str) -> str:
        for form in ("calls", "calls as text"):
            answer = _answer(form, [_EXAMPLE_NAME])
            text = self._try(
                [{"role": "user", "content": "x"}, answer, _example_reply("tool")], [_EXAMPLE_TOOL]
            )
            begun = self._try([{"role": "user", "content": "x"}], [_EXAMPLE_TOOL], opens=False)
            after = (
                text[len(begun) :] if text.startswith(begun) else text[text.rfind(header.strip() or "\0") :]
            )
            if _EXAMPLE_NAME in after and _MARK in after:
                return after[: after.find(_REPLY_MARK) if _REPLY_MARK in after else None]
        return ""

    def _separator(self) -> str:
        """Between the end-of-turn token of an answer and the next header."""
        asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        after = self._try(asked, None, opens=False).partition(_MARK)[2]
        return after[len(after.rstrip()) :] if after.strip() else ""


def _answer(form: str, call_names: Sequence[str]) -> dict[str, Any]:
    """The answer of a made-up conversation, with the mark at its end."""
    if form == "text" or not call_names:
        return {"role": "assistant", "content": _MARK}
    arguments: Any = {"value": _MARK}
    if form.endswith("as text"):
        arguments = json.dumps(arguments)
    names = call_names[:1] if form.startswith("first") else call_names
    calls = [
        {"id": call_id(number), "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _example_reply(role: str) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": role, "content": _REPLY_MARK}
    return reply | ({"tool_call_id": call_id(0), "name": _EXAMPLE_NAME} if role == "tool" else {})


def call_id(number: int) -> str:
    """Id of the call of this number in an answer: nine letters and digits, which is what all templates take."""
    return f"call{number:05d}"


def _count(ids: Sequence[int], wanted: Collection[int]) -> int:
    return sum(token in wanted for token in ids)
