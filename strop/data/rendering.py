"""Texts of many conversations through the chat template, those that are alike rendered at once.

A rendering by itself is quick, but it is asked of another process (`strop.utils.chat_template`): one request for many
conversations takes a fraction of the time of one for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from strop.data.chat import Chat, render
from strop.protocol.trajectory import continues
from strop.utils.chat_template import TemplateRefused, TemplateTooCostly, apply_template_to_all

_BATCH = 64
"""Texts per request: enough to amortise it, few enough that one costly text makes few others wait."""


@dataclass(frozen=True)
class ChatPart:
    """A conversation, or its first messages, and how they are rendered: the arguments of `render`."""

    chat: Chat
    num_messages: int | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False

    @property
    def ends(self) -> dict[str, bool]:
        """The arguments that say how the text ends."""
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


def prompt_part(chat: Chat) -> ChatPart:
    """A prompt: with the beginning of an answer, or up to the last word of a last message of the assistant."""
    is_continued = continues(chat.messages)
    return ChatPart(chat, add_generation_prompt=not is_continued, continue_final_message=is_continued)


def render_parts(tokenizer: PreTrainedTokenizerBase, parts: Sequence[ChatPart]) -> list[str | ValueError]:
    """Texts in the order of the parts, each as of `render`; the error of `render` in place of one that is refused.

    Rendered at once are parts with the same tools, options and ends that follow each other, others with other ends
    between them or not.

    Raises:
        TemplateTooCostly: one of them, by itself, takes more time or memory than any conversation needs.
    """
    texts: dict[int, str | ValueError] = {}
    by_end = sorted(range(len(parts)), key=lambda number: tuple(parts[number].ends.values()))
    for _, alike in itertools.groupby(by_end, key=lambda number: _template_inputs(parts[number])):
        while batch := list(itertools.islice(alike, _BATCH)):
            texts |= zip(batch, _render_alike(tokenizer, [parts[number] for number in batch]), strict=True)
    return [texts[number] for number in range(len(parts))]


def _template_inputs(part: ChatPart) -> tuple[object, ...]:
    """All that a rendering is given beside the messages."""
    return part.chat.tools, part.chat.options, part.ends


def _render_alike(
    tokenizer: PreTrainedTokenizerBase, parts: Sequence[ChatPart]
) -> Sequence[str | ValueError]:
    chat, ends = parts[0].chat, parts[0].ends
    messages = [part.chat.messages[: part.num_messages] for part in parts]
    try:
        return apply_template_to_all(tokenizer, messages, chat.tools, **ends, **chat.options)
    except (TemplateRefused, TemplateTooCostly):
        return [_render_alone(tokenizer, part) for part in parts]


def _render_alone(tokenizer: PreTrainedTokenizerBase, part: ChatPart) -> str | ValueError:
    try:
        return render(tokenizer, part.chat, num_messages=part.num_messages, **part.ends)
    except TemplateTooCostly:
        raise
    except ValueError as error:
        return error
