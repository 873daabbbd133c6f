"""Rendering of chat messages to text and token ids, through the template of the tokenizer.

Text is rendered first and encoded afterwards, without special tokens of the tokenizer's own: those of the
template are all there are.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.data.config import JsonMessages, check_template_kwargs
from strop.data.media import MEDIA_COLUMNS, has_media, refuse_unread
from strop.protocol.trajectory import Media, continues
from strop.utils.chat_template import TemplateRefused, apply_template
from strop.utils.sanitize import encodable_value, read_json

NO_TEMPLATE = (
    "the tokenizer of {name} has no chat template, so chat messages cannot be turned into tokens; use an "
    "instruct model, or name a Jinja template with model.chat_template (a file, or its text)"
)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Messages with all else that the template sees of a row."""

    messages: tuple[Mapping[str, Any], ...]
    """Each with a `role`, mostly a `content`, and what else the template knows."""
    where: str
    """Names the row in errors, for example `train row 17`."""
    tools: list[dict[str, Any]] | None = None
    """Tool schemas in the function form of OpenAI."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    media: tuple[Any, ...] = ()
    """Images and videos, in the order of the messages' parts; not rendered."""


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError that says what to do when the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise ValueError(NO_TEMPLATE.format(name=repr(tokenizer.name_or_path or type(tokenizer).__name__)))


def to_messages(value: object, *, role: str, where: str, key: str) -> tuple[dict[str, Any], ...]:
    """Chat messages of a column: a list of messages as it is, a string as one message of `role`.

    Keys of messages, parts and calls whose value is None are dropped: libraries give every message the keys of all.
    Arguments of tool calls stay as they are, or become the object that chat templates expect where they are JSON text;
    an assistant message with tool calls alone gets an empty content.
    """
    value = encodable_value(value)
    if isinstance(value, str):
        return ({"role": role, "content": value},)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(
            f"{where}: column {key!r} holds {_shown(value)}; it must be a string or a list of messages "
            f'{{"role": ..., "content": ...}}'
        )
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{where}: message {number} of column {key!r} is {_shown(message)}; each message needs a "
                f'"role" such as "user" and a "content"'
            )
    return tuple(
        _with_tool_calls(_without_none(message), f"{where}: message {number} of column {key!r}")
        for number, message in enumerate(value, start=1)
    )


def from_json_text(value: object, mode: JsonMessages, *, where: str, key: str, setting: str) -> object:
    """Value of a column, with messages in place of their JSON text where `mode` says so.

    Args:
        value: of the column.
        mode: treatment of such a text.
        where, key: as of `to_messages`.
        setting: full key of `mode`.

    Raises:
        ValueError: it is refused, or looks like messages and cannot be read.
    """
    if mode == "text" or not isinstance(value, str):
        return value
    messages = messages_in(value)
    if messages is None:
        if _LIKE_MESSAGES.match(value):
            raise ValueError(
                f"{where}: column {key!r} holds a text that looks like messages and cannot be read as such "
                f'({_shown(value)}): store a list of {{"role": ..., "content": ...}} or its JSON; {setting}=text takes '
                f"the text itself as one message"
            )
        return value
    if mode == "refuse":
        raise ValueError(
            f"{where}: column {key!r} holds messages as JSON text; {setting}=read reads them, {setting}=text takes the "
            f"text itself as one message"
        )
    return messages


_LIKE_MESSAGES = re.compile(
    r"""(?s:(?=.*["'](content|value)\\?["']\s*:))
    \s*["']?                                                  # a text in a text
    (\{\s*\\?["'](messages|conversations?|prompt)\\?["']\s*:\s*)?
    (array\(\s*)?\[?\s*\{[^{}]*?
    \\?["'](role|from)\\?["']\s*:\s*
    \\?["'](system|developer|user|human|assistant|gpt|model|tool|function)\\?["']""",
    re.VERBOSE,
)
"""The beginning of messages as somebody's program printed them: a first object with a role."""


def messages_in(text: str) -> list[Any] | None:
    """The messages of a text that is a list of them, as JSON or as Python prints it, or one message, or an object that
    has them as `messages`, or one of these encoded twice; None for any other."""
    if text.lstrip()[:1] not in ("[", "{", '"') or "role" not in text:
        return None
    for read in (read_json, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, str):
            return messages_in(value) if len(value) < len(text) else None
        if isinstance(value, Mapping):
            if value.keys() == {"messages"}:  # beside others, these would be lost
                value = value["messages"]
            else:
                value = [value] if "role" in value and _LIKE_MESSAGES.match(text) else None
        if isinstance(value, list) and value:
            if all(isinstance(item, Mapping) and isinstance(item.get("role"), str) for item in value):
                return value
            return None
    return None


def check_last(messages: Sequence[Mapping[str, Any]], where: str, *, may_continue: bool) -> None:
    """Refuse, by a ValueError, a prompt whose last message is the assistant's, where data.continue_final_message is
    false."""
    if continues(messages) and not may_continue:
        raise ValueError(
            f"{where} ends with a message of the assistant, and data.continue_final_message is false: remove that "
            f"message, or set it to true, so that the answer continues it"
        )


def check_begun(prompt: Sequence[Mapping[str, Any]], answer: Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse, by a ValueError, an answer of the assistant to a prompt that ends with the assistant's words: in a run
    it goes on with them, and here it would be a turn of its own."""
    if continues(prompt) and answer[0]["role"] == "assistant":
        raise ValueError(
            f"{where}: the prompt ends with a message of the assistant, and the answer would not continue it, but be "
            f"another one: put its text at the beginning of the answer"
        )


def _with_tool_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(
            f"{where} has tool_calls {_shown(calls)}; they must be a list of "
            f'{{"type": "function", "function": {{"name": ..., "arguments": {{...}}}}}}'
        )
    read = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping):
            read.append({**call, "function": _with_arguments(function, where)})
        else:
            read.append(_with_arguments(call, where))
    return {**message, "content": message.get("content", ""), "tool_calls": read}


def _with_arguments(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            arguments = None
    if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
        raise ValueError(
            f"{where} has the tool call {_shown(function)}; a tool call has a name, and as arguments an object or "
            f"its JSON text"
        )
    return {**function, "arguments": arguments}


def to_chat(
    row: Mapping[str, Any],
    messages: tuple[dict[str, Any], ...],
    *,
    options: Mapping[str, Any],
    where: str,
    media_columns: Mapping[str, str] | None = None,
) -> Chat:
    """The messages with the row's `tools` (list, or its JSON text) and variables of the template, if it has them.

    Args:
        row: of the data.
        messages: of the chat.
        options: further variables of the template.
        where: names the row in errors.
        media_columns: kind of media -> column, where images and videos are read.

    Raises:
        ValueError: one of these is malformed, or the row has sound, media that nothing here reads, or other media than
            its messages have places for.
    """
    refuse_unread(row, messages, where, media_columns or MEDIA_COLUMNS)  # before media that may be missing
    media: tuple[Any, ...] = ()
    if media_columns is not None and has_media(row, messages, media_columns):
        from strop.data.media_rows import take_media  # torch and Pillow: seconds

        messages, media = take_media(row, messages, media_columns, where)
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = read_json(tools)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: column 'tools' is text that is not JSON ({error.msg} at character {error.pos}); "
                f"write a list of tool schemas"
            ) from error
        except ValueError as error:
            raise ValueError(f"{where}: column 'tools' cannot be read: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{where}: column 'tools' holds {_shown(tools)}; it must be a list of tool schemas")
    options = {**options, **row_template_options(row, where)}
    return Chat(messages=messages, where=where, tools=tools or None, options=options, media=media)


def row_template_options(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Variables of the template that a row has of its own: `enable_thinking`, and those in `chat_template_kwargs`.

    Raises:
        ValueError: these are no variables.
    """
    options = row.get("chat_template_kwargs")
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(
            f"{where}: column 'chat_template_kwargs' holds {_shown(options)}; it must be an object with variables of "
            f"the chat template"
        )
    # Tables give every row the variables of all.
    chosen = {name: value for name, value in (options or {}).items() if value is not None}
    check_template_kwargs(f"{where}: column 'chat_template_kwargs'", chosen)
    thinking = row.get("enable_thinking")
    if thinking is not None:
        if not isinstance(thinking, bool):  # the text "false" would count as true
            raise ValueError(
                f"{where}: column 'enable_thinking' holds {_shown(thinking)}; it must be true or false"
            )
        chosen["enable_thinking"] = thinking
    return chosen


def render(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    *,
    num_messages: int | None = None,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
) -> str:
    """Text of the first `num_messages` messages (all by default) through the chat template.

    Args:
        tokenizer: with a chat template.
        chat: messages, tools and options.
        num_messages: number of messages.
        add_generation_prompt: with the beginning of an answer behind them.
        continue_final_message: up to the last word of the last one.

    Raises:
        ValueError: the template refuses them.
    """
    ends = {"continue_final_message": True} if continue_final_message else {}
    try:
        text = apply_template(
            tokenizer,
            chat.messages[:num_messages],
            chat.tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **ends,
            **chat.options,
        )
    except TemplateRefused as error:
        raise ValueError(template_refused(chat, error)) from error
    return str(text)


def render_prompt(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """Text of a prompt, up to its answer: with the beginning of one, or up to the last word of a last message of the
    assistant, which the answer continues."""
    is_continued = continues(chat.messages)
    return render(
        tokenizer, chat, add_generation_prompt=not is_continued, continue_final_message=is_continued
    )


def template_refused(chat: Chat, error: Exception) -> str:
    """Sentence for messages that the chat template cannot render."""
    roles = ", ".join(str(message["role"]) for message in chat.messages)
    return (
        f"{chat.where}: the chat template cannot render the messages (roles: {roles}): {error}; change the "
        f"row, or use a template that knows these roles and contents"
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of rendered text; control tokens in it become their single ids, none is added."""
    return encode_all(tokenizer, [text])[0]


def encode_all(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of several rendered texts, in one call of the tokenizer."""
    if not texts:
        return []
    # verbose=False: the tokenizer's own length warning is about a limit that is not ours.
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def control_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that stand for structure, not for text: end of turn, role headers and the like."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _without_none(value: object) -> Any:
    """Remove keys whose value is None at every depth, except in the arguments of calls."""
    if isinstance(value, Mapping):
        return {
            key: item if key == "arguments" else _without_none(item)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value


def _shown(value: object, limit: int = 80) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= limit else text[: limit - 1] + '…'}"


def shown_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], media: Sequence[Media]) -> str:
    """Ids as the model sees them, special tokens included, with `<image 448x448: 256 tokens>` for each medium.

    Of a video the times are those that its file says.
    """
    pieces, at = [], 0
    for medium in media:
        start, end = medium.span
        width, height = medium.size
        pieces.append(str(tokenizer.decode(list(token_ids[at:start]), skip_special_tokens=False)))
        times, frames = medium.times, ""
        if times:
            frames = f", {len(times)} frames from {times[0]:.1f} to {times[-1]:.1f} s"
        pieces.append(f"<{medium.kind} {width}x{height}: {medium.num_tokens} tokens{frames}>")
        at = end
    pieces.append(str(tokenizer.decode(list(token_ids[at:]), skip_special_tokens=False)))
    return "".join(pieces)
