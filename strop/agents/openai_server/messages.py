"""Chat messages: read from requests, compared by keys, and converted for the chat template."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.agents.openai_server.errors import invalid
from strop.agents.tools.conversation import thinking_fields
from strop.agents.tools.templates import ChatTemplate
from strop.utils.sanitize import encodable_value, read_json

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "input_image")


@dataclass(frozen=True)
class Call:
    """A tool call in a conversation."""

    id: str
    """As the client knows it."""
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True)
class Message:
    """One message, whatever form the client gave it."""

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    """Of a tool's message: the call that it answers."""
    parts: tuple[str | bytes, ...] = ()
    """Texts and encoded images in order, where there are images."""
    reasoning: str = ""
    """Thinking before the content, of the assistant; where the template has a place for it."""

    @property
    def images(self) -> tuple[bytes, ...]:
        """Encoded images, in order."""
        return tuple(part for part in self.parts if isinstance(part, bytes))

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for messages with the same content: clients strip texts, write JSON anew and give calls other ids."""
        calls = tuple((call.name, _canonical(call.arguments)) for call in self.calls)
        return (
            self.role,
            self.content.strip(),
            calls,
            *(hashlib.sha256(image).digest() for image in self.images),
        )


ConversationKey = tuple[tuple[Any, ...], ...]
"""Keys of a conversation."""


def conversation_key(messages: Sequence[Message]) -> ConversationKey:
    """The keys of these messages."""
    return tuple(message.key for message in messages)


def read_messages(value: object, *, param: str = "messages") -> tuple[Message, ...]:
    """The messages of a request.

    Raises:
        ApiError: something in them cannot be shown to the model.
    """
    value = encodable_value(value)
    if not isinstance(value, list) or not value:
        raise invalid(param, "must be a list of messages, each with a role and a content")
    return tuple(_read_message(message, f"{param}[{number}]") for number, message in enumerate(value))


def _read_message(value: object, param: str) -> Message:
    if not isinstance(value, Mapping) or value.get("role") not in _ROLES:
        raise invalid(param, f"must be an object with a role of {', '.join(_ROLES)}")
    role = _ROLES[str(value["role"])]
    parts = _parts_of(value.get("content"), f"{param}.content", takes_images=role == "user")
    content = "".join(part for part in parts if isinstance(part, str))
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise invalid(f"{param}.tool_calls", "must be a list, in a message of the assistant")
    call_id = value.get("tool_call_id") or ""
    if role == "tool" and not (isinstance(call_id, str) and call_id):
        raise invalid(f"{param}.tool_call_id", "a tool's message names the call that it answers")
    read_calls = tuple(_read_call(call, f"{param}.tool_calls[{number}]") for number, call in enumerate(calls))
    has_images = any(isinstance(part, bytes) for part in parts)
    return Message(
        role, content, read_calls, call_id if role == "tool" else "", tuple(parts) if has_images else (),
        _reasoning_of(value) if role == "assistant" else "",
    )  # fmt: skip


def _reasoning_of(message: Mapping[str, Any]) -> str:
    """Thinking in one of the fields in which servers send it and clients send it back."""
    fields = (message.get(name) for name in ("reasoning_content", "reasoning"))
    return next((field for field in fields if isinstance(field, str) and field), "")


def text_of(content: object, param: str) -> str:
    """The text of a content, which may come in parts.

    Raises:
        ApiError: a part is no text.
    """
    return "".join(str(part) for part in _parts_of(content, param, takes_images=False))


def _parts_of(content: object, param: str, *, takes_images: bool) -> list[str | bytes]:
    """Texts and images of a content; raises as `text_of`."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise invalid(param, "must be a string or a list of parts")
    parts: list[str | bytes] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _IMAGE_PARTS and takes_images:
            parts.append(_image_of(part.get("image_url"), f"{param}[{number}]"))
            continue
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            accepted = "text and images" if takes_images else "text"
            raise invalid(
                f"{param}[{number}]", f"is a part of type {kind!r}; this server takes {accepted} here"
            )
        parts.append(text)
    return parts


def _image_of(value: object, param: str) -> bytes:
    """The encoded image of a data: URL."""
    url = value.get("url") if isinstance(value, Mapping) else value
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (head.startswith("data:") and head.endswith(";base64") and comma):
        raise invalid(
            param, "must have an image_url that begins with data:image/...;base64, (nothing is fetched)"
        )
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise invalid(param, "has an image_url that is no base64") from None


def _read_call(value: Any, param: str) -> Call:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(param, 'must be {"id", "type": "function", "function": {"name", "arguments"}}')
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Call(str(value.get("id") or ""), function["name"], text)


def read_tools(value: object) -> list[dict[str, Any]]:
    """Schemas of functions, in the form of chat completions; that of responses is read too.

    Raises:
        ApiError: a tool is none.
    """
    tools = []
    for number, tool in enumerate(encodable_value(value) or []):
        param = f"tools[{number}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise invalid(param, 'must be {"type": "function", ...}; this server runs no tools of its own')
        function = tool.get("function", {key: item for key, item in tool.items() if key != "type"})
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid(param, "must have a function with a name")
        schema = {key: item for key, item in function.items() if key != "strict" and item is not None}
        tools.append({"type": "function", "function": schema})
    return tools


def as_template(
    messages: Sequence[Message], template: ChatTemplate, written_ids: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The messages in the form of the chat template; texts in them make no control tokens.

    Args:
        messages: of a conversation, from its beginning or from a message on.
        template: of the model.
        written_ids: of calls, as the model wrote them, by the ids that the client knows.

    Raises:
        ApiError: a tool's message answers an unknown call.
    """
    template_messages: list[dict[str, Any]] = []
    calls: dict[str, tuple[str, str]] = {}
    results: list[Message] = []
    for message in (*messages, None):
        if message is not None and message.role == "tool":
            if message.call_id not in calls:
                raise invalid(
                    "messages", f"a tool answers {message.call_id!r}, but no call before it has that id"
                )
            results.append(message)
            continue
        if results:  # in the order of the calls: templates without ids tell them apart by it
            order = {call_id: number for number, call_id in enumerate(calls)}
            results.sort(key=lambda result: order[result.call_id])
            template_messages += template.reply_messages(
                [(*calls[result.call_id], result.content) for result in results]
            )
            results = []
        if message is not None:
            template_messages.append(_template_message(message, template, written_ids, calls))
    return template_messages


def _template_message(
    message: Message,
    template: ChatTemplate,
    written_ids: Mapping[str, str],
    calls: dict[str, tuple[str, str]],
) -> dict[str, Any]:
    """A message other than a tool's; adds the template's ids and names of its calls to `calls`."""
    content: str | None = template.as_plain_text(message.content)
    if message.parts:
        return {"role": message.role, "content": [_part(part, template) for part in message.parts]}
    thinking = thinking_fields(template.as_plain_text(message.reasoning)) if message.reasoning else {}
    if not message.calls:
        return {"role": message.role, "content": content, **thinking}
    names = [template.as_plain_text(call.name) for call in message.calls]
    ids = template.call_ids(names, [written_ids.get(call.id) for call in message.calls])
    for call, written_id, name in zip(message.calls, ids, names, strict=True):
        calls.pop(call.id, None)  # an id that an earlier answer had stands where it was used last
        calls[call.id] = (written_id, name)
    functions = [
        {
            "id": written_id,
            "type": "function",
            "function": template.as_plain_message({"name": name, "arguments": _object(call.arguments)}),
        }
        for call, written_id, name in zip(message.calls, ids, names, strict=True)
    ]
    content = content or template.profile.no_content
    return {"role": message.role, "content": content, **thinking, "tool_calls": functions}


def forms_of(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages in the forms in which a template may take them, best first.

    Some templates refuse thinking beside a content and calls, and some refuse arguments that are no object: the later
    forms have no thinking, `{}` in place of such arguments, or both.
    """
    yield messages
    has_thinking = any(message.reasoning for message in messages)
    if has_thinking:
        yield _without_thinking(messages)
    mended = [_with_objects(message) for message in messages]
    if mended != list(messages):
        yield mended
        if has_thinking:
            yield _without_thinking(mended)


def _without_thinking(messages: Sequence[Message]) -> list[Message]:
    return [replace(message, reasoning="") if message.reasoning else message for message in messages]


def _with_objects(message: Message) -> Message:
    """The message with `{}` where arguments of its calls are no object."""
    if all(isinstance(_object(call.arguments), dict) for call in message.calls):
        return message
    calls = (
        call if isinstance(_object(call.arguments), dict) else replace(call, arguments="{}")
        for call in message.calls
    )
    return replace(message, calls=tuple(calls))


def _part(part: str | bytes, template: ChatTemplate) -> dict[str, str]:
    """A part in the form of the template; pixels are put in its place later."""
    return (
        {"type": "text", "text": template.as_plain_text(part)} if isinstance(part, str) else {"type": "image"}
    )


def _object(text: str) -> Any:
    """The object that templates expect as arguments; the text where it is none."""
    try:
        value = read_json(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _canonical(text: str) -> str:
    """JSON written in one way; other text as it is."""
    try:
        return json.dumps(read_json(text), sort_keys=True)
    except ValueError:
        return text
