"""Properties of a chat template in conversations that go on, probed once per model by rendering examples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
Calls = Sequence[tuple[str, str]]
"""Id and tool of each call of an answer."""

MARK, REPLY_MARK = "ANSWERMARK", "REPLYMARK"
_THOUGHT = "THOUGHTMARK"
_THINKING = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
_THINK = "<think>"
_UNFINISHED = re.compile(r"[<\[][^<>\[\]\s]*$")
"""An unfinished tag: texts that differ inside of one differ from its beginning."""
QUESTION: Message = {"role": "user", "content": "x"}
_SYSTEM: Message = {"role": "system", "content": "y"}
EXAMPLE_NAME = "look_up"
EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": EXAMPLE_NAME,
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "The word."}},
            "required": ["value"],
        },
    },
}


@dataclass(frozen=True)
class CallExample:
    """A call as a chat template writes it."""

    text: str
    """From the header of the answer on."""
    readings: tuple[str, ...]
    """The answer without its header, up to where it may end."""
    name: str = EXAMPLE_NAME
    """Tool that is called."""
    arguments: Mapping[str, str] | None = None
    """Arguments of the call."""


@dataclass(frozen=True, kw_only=True)
class TemplateProfile:
    """Properties of a chat template in conversations that go on."""

    reply_role: str
    """Role of tool results: `tool`, or `user` where the template knows no other."""
    forgets_thinking_at: frozenset[str]
    """Roles of replies after which earlier thinking is no longer shown."""
    rewrites_at: frozenset[str]
    """Roles of replies after which earlier messages are written differently, thinking aside."""
    rewrites_after_system_at: frozenset[str]
    """The same for conversations that begin with a system message."""
    takes_raw_answers: bool
    """An earlier answer can be given as its text, tool calls included."""
    knows_thinking: bool
    """The thinking of an earlier answer can be given in a field of its own."""
    before_text: str
    """Text that the template writes before an answer, and the model too."""
    no_content: str | None
    """Content of an answer that is calls alone."""
    ids_name_tools: bool
    """A call is written with its id alone, which names the tool."""
    thinking_opening: str
    """Text that opens the thinking in the header of an answer; empty where the model opens it."""
    shows_tools: bool
    """Tool schemas become part of the prompt."""
    call_example: CallExample | None
    """A call of the tool look_up, as the template writes it."""

    @property
    def begins_in_thinking(self) -> bool:
        """The header of an answer opens the thinking."""
        return bool(self.thinking_opening)

    def rewrites_history(self, role: str, *, has_system: bool, has_thinking: bool) -> bool:
        """Earlier turns are written differently once a reply of this role follows them.

        Args:
            role: of the reply.
            has_system: the conversation begins with a system message.
            has_thinking: an earlier answer has thinking.
        """
        rewrites_at = self.rewrites_after_system_at if has_system else self.rewrites_at
        return role in rewrites_at or (has_thinking and role in self.forgets_thinking_at)


def find_profile(
    render: Callable[[Sequence[Message], Sequence[Message] | None, bool], str],
    cuts: Callable[[str], Sequence[int]],
) -> TemplateProfile:
    """Probe a template with examples.

    Args:
        render: text of a conversation with tools, perhaps with the header of the next answer; empty where the
            template refuses it.
        cuts: positions in a text where tokens of their own begin.
    """
    return _Probe(render, cuts).profile()


class _Probe:
    """Renders example conversations and compares the texts."""

    def __init__(
        self,
        render: Callable[[Sequence[Message], Sequence[Message] | None, bool], str],
        cuts: Callable[[str], Sequence[int]],
    ) -> None:
        self._render, self._cuts = render, cuts
        self._no_content: str | None = ""
        self._ids_name_tools = False

    def profile(self) -> TemplateProfile:
        self._ids_name_tools = self._writes_ids_alone()
        self._no_content = self._content_of_calls()
        role = "tool" if self._render_replied("tool") else "user"
        roles = dict.fromkeys((role, "user"))
        header = self._header()
        is_raw = self._takes_raw_answers(role)
        opening = header[header.rfind(_THINK) :] if header.rstrip().endswith(_THINK) else ""
        return TemplateProfile(
            reply_role=role,
            forgets_thinking_at=frozenset(
                reply_role for reply_role in roles if self._forgets(reply_role, is_raw)
            ),
            rewrites_at=frozenset(
                reply_role for reply_role in roles if self._rewrites(reply_role, [QUESTION])
            ),
            rewrites_after_system_at=frozenset(
                reply_role for reply_role in roles if self._rewrites(reply_role, [_SYSTEM, QUESTION])
            ),
            takes_raw_answers=is_raw,
            knows_thinking=self._knows_thinking(),
            before_text=self._before_text(),
            no_content=self._no_content,
            ids_name_tools=self._ids_name_tools,
            thinking_opening=opening,
            shows_tools=EXAMPLE_NAME in self._render([QUESTION], [EXAMPLE_TOOL], True),
            call_example=self._call_example(header),
        )

    def _try(self, messages: Sequence[Message], opens: bool = True) -> str:
        """Without tools, or with one where the template insists."""
        return self._render(messages, None, opens) or self._render(messages, [EXAMPLE_TOOL], opens)

    def _calls(self) -> Calls:
        return [(f"functions.{EXAMPLE_NAME}:0" if self._ids_name_tools else call_id(0), EXAMPLE_NAME)]

    def _answers(self, role: str) -> Iterator[dict[str, Any]]:
        """Ways to give an answer that a reply of this role follows."""
        return made_up_answers(self._calls() if role == "tool" else (), self._no_content)

    def _reply(self, role: str) -> dict[str, Any]:
        return example_reply(role, *self._calls()[0])

    def _header(self) -> str:
        """Text that opens an answer."""
        messages = [{"role": "user", "content": MARK}]
        closed, opened = self._try(messages, opens=False), self._try(messages)
        return opened[len(closed) :] if opened.startswith(closed) else ""

    def _render_replied(self, role: str, **answer: str) -> str:
        """A conversation in which an answer with these fields was replied to; empty when it is refused."""
        for called in self._answers(role):
            content = (
                {"content": answer["content"] + (called["content"] or "")} if "content" in answer else {}
            )
            text = self._try([QUESTION, {**called, **answer, **content}, self._reply(role)])
            if MARK in text and REPLY_MARK in text:
                return text
        return ""

    def _writes_ids_alone(self) -> bool:
        """True when a call shows the name of its tool only where its id has it."""
        shows_name = []
        for self._ids_name_tools in (False, True):
            calls = [answer for answer in self._answers("tool") if "tool_calls" in answer]
            shows_name.append(
                any(EXAMPLE_NAME in self._try([QUESTION, answer], opens=False) for answer in calls)
            )
        return shows_name == [False, True]

    def _content_of_calls(self) -> str | None:
        """None where an empty text would be shown as an answer of its own, or refused."""
        for answer in self._answers("tool"):
            empty, missing = (
                self._try([QUESTION, {**answer, "content": content}, self._reply("tool")])
                for content in ("", None)
            )
            if "tool_calls" in answer and MARK in missing and REPLY_MARK in missing:
                return None if not empty or len(missing) < len(empty) else ""
        return ""

    def _forgets(self, role: str, is_raw: bool) -> bool:
        """True when thinking before an answer is dropped once the answer is replied to."""
        if is_raw and not self._knows_thinking():
            raw = {"role": "assistant", "content": f"{_THINK}\n{_THOUGHT}\n</think>\n\n{MARK}"}
            written = self._try([QUESTION, raw, self._reply(role)])
            return MARK in written and _THOUGHT not in written
        replied = self._render_replied(role, **_THINKING)
        return self._knows_thinking() and bool(replied) and _THOUGHT not in replied

    def _knows_thinking(self) -> bool:
        """True when thinking can be given in a field of its own."""
        alone = [QUESTION, {"role": "assistant", "content": MARK, **_THINKING}]
        return _THOUGHT in self._try(alone, opens=False) + self._render_replied("tool", **_THINKING)

    def _before_text(self) -> str:
        """Text that the template writes between the header of an answer and the answer."""
        messages = [QUESTION, {"role": "assistant", "content": MARK}]
        opened, written = self._try([QUESTION]), self._try(messages, opens=False).partition(MARK)[0]
        return written[len(opened) :] if written.startswith(opened) else ""

    def _rewrites(self, role: str, prompt: Sequence[Message]) -> bool:
        """True when a second reply changes the text before it."""
        for answer in self._answers(role):
            conversation = [*prompt, answer, self._reply(role)]
            later = self._render([*conversation, answer, self._reply(role)], [EXAMPLE_TOOL], True)
            earlier = self._render(conversation, [EXAMPLE_TOOL], False)
            first = self._render(prompt, [EXAMPLE_TOOL], False)
            if later and earlier:
                return not (later.startswith(earlier) and later.startswith(first))
        return False

    def _takes_raw_answers(self, role: str) -> bool:
        """True when a call given as text is rendered like one given in its parts, also when more follows."""
        raw = {"role": "assistant", "content": f"{MARK} <tool_call>"}
        text = self._try([QUESTION, raw, self._reply(role)])
        if MARK not in text or REPLY_MARK not in text:
            return False
        if role != "tool":
            return True
        for more in ([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], []):
            for answer in self._answers(role):
                parts = self._try([QUESTION, answer, self._reply(role), *more])
                if not (MARK in parts and REPLY_MARK in parts):
                    continue
                text_answer = {"role": "assistant", "content": _THOUGHT}
                before, mark, after = self._try([QUESTION, text_answer, self._reply(role), *more]).partition(
                    _THOUGHT
                )
                before = _common_start(before, parts)
                if not (mark and parts.endswith(after)):
                    return False
                written = parts[len(before) : len(parts) - len(after)]
                whole = self._try([QUESTION, {**text_answer, "content": written}, self._reply(role), *more])
                is_alike = whole.split() == parts.split()
                return whole == parts or (is_alike and not self._knows_thinking())
        return True

    def _call_example(self, header: str) -> CallExample | None:
        prompt, opened = (self._render([QUESTION], [EXAMPLE_TOOL], opens) for opens in (False, True))
        for answer in self._answers("tool"):
            if "tool_calls" not in answer:
                break
            text = self._render([QUESTION, answer, self._reply("tool")], [EXAMPLE_TOOL], True)
            start = len(prompt) if text.startswith(prompt) else max(0, text.rfind(header.strip() or "\0"))
            stop = text.find(REPLY_MARK, start)
            written = text[start : stop if stop >= 0 else None]
            if EXAMPLE_NAME not in written or MARK not in written:
                continue
            begins = _common_start(written, opened[len(prompt) :] or header)
            body = written[len(_UNFINISHED.sub("", begins)) :]
            end = body.rfind(MARK)
            ends = [cut for cut in self._cuts(body) if cut > end]
            return CallExample(
                written, tuple(body[:cut] for cut in [*ends, len(body)]), arguments={"value": MARK}
            )
        return None


def made_up_answers(calls: Calls, no_content: str | None) -> Iterator[dict[str, Any]]:
    """Ways to give the answer of a made-up conversation, with the mark at its end; templates differ in what they take.

    Args:
        calls: those of the answer; without any it is text.
        no_content: content beside calls.
    """
    for chosen in (calls, calls[:1]) if calls else ():
        for arguments in ({"value": MARK}, json.dumps({"value": MARK})):
            functions = [
                {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
                for identity, name in chosen
            ]
            yield {"role": "assistant", "content": no_content, "tool_calls": functions}
    yield {"role": "assistant", "content": MARK}


def _common_start(text: str, other_text: str) -> str:
    end = 0
    while end < min(len(text), len(other_text)) and text[end] == other_text[end]:
        end += 1
    return text[:end]


def example_reply(role: str, identity: str, name: str) -> dict[str, Any]:
    """The reply of a made-up conversation."""
    reply: dict[str, Any] = {"role": role, "content": REPLY_MARK}
    return reply | ({"tool_call_id": identity, "name": name} if role == "tool" else {})


def call_id(number: int) -> str:
    """Id of the call of this number in an answer: nine letters and digits, as most templates require."""
    return f"call{number:05d}"
