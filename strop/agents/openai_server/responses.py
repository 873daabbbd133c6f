"""/v1/responses: conversations as items, and answers as items and events, as the client of OpenAI reads them."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strop.agents.openai_server.chat import logprobs_of
from strop.agents.openai_server.completion import Choice, CompletionResult
from strop.agents.openai_server.errors import ApiError, invalid
from strop.agents.openai_server.messages import Call, Message, read_messages, text_of
from strop.agents.openai_server.request import CallRequest, read_response
from strop.agents.openai_server.session import Session


def read_conversation(body: object, session: Session) -> tuple[CallRequest, tuple[Message, ...]]:
    """The call, and its conversation without instructions, which hold for this call alone.

    Raises:
        ApiError: it cannot be served.
    """
    params: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    previous = params.get("previous_response_id")
    if previous is not None and previous not in session.responses:
        raise ApiError(
            404, f"this session has no response {previous!r}", param="previous_response_id", code="not_found"
        )
    earlier = session.responses[previous] if previous is not None else ()
    input_value = params.get("input")
    if isinstance(input_value, str):
        items: Sequence[Message] = (Message("user", input_value),)
    else:
        items = _read_items(input_value, session)
    conversation = (*earlier, *items)
    instructions = params.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise invalid("instructions", "must be a text")
    system = (Message("system", instructions),) if instructions else ()
    return read_response(body, (*system, *conversation)), conversation


def _read_items(value: object, session: Session) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise invalid("input", "must be a text, or a list of items")
    messages: list[Message] = []
    for number, item in enumerate(value):
        param = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            messages += read_messages([item], param="input")
        elif kind == "function_call":
            _add_call(messages, item, param, session)
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise invalid(f"{param}.call_id", "names the call that it answers")
            text = text_of(item.get("output"), f"{param}.output")
            messages.append(Message("tool", text, (), item["call_id"]))
        elif kind != "reasoning":  # of earlier answers, whose tokens the session has
            raise invalid(param, f"is of type {kind!r}; use message, function_call or function_call_output")
    if not messages:
        raise invalid("input", "has no message")
    return messages


def _add_call(messages: list[Message], item: Mapping[str, Any], param: str, session: Session) -> None:
    """Add a call to the message of the assistant before it, where there is one; behind outputs, too, where the model
    wrote it in the same answer as the calls of that message."""
    name, arguments = item.get("name"), item.get("arguments", "")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise invalid(param, "must have a name, and arguments as JSON text")
    call = Call(str(item.get("call_id") or ""), name, arguments)
    number = len(messages) - 1
    while number >= 0 and messages[number].role == "tool":
        number -= 1
    last = messages[number] if number >= 0 and messages[number].role == "assistant" else None
    is_next = number == len(messages) - 1
    if last is not None and (is_next or session.answers.has_answer_of([*last.calls, call])):
        messages[number] = dataclasses.replace(last, calls=(*last.calls, call))
    else:
        messages.append(Message("assistant", "", (call,)))


class ResponseFormat:
    """Format of one call's answer, with the methods of `chat.CompletionFormat`."""

    def __init__(
        self, body: Mapping[str, Any], request: CallRequest, conversation: Sequence[Message], session: Session
    ) -> None:
        self._body, self._request, self._session = body, request, session
        self._conversation = tuple(conversation)
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._item_id = f"msg_{secrets.token_hex(16)}"
        self._text = ""
        self._number = 0

    def whole(self, result: CompletionResult) -> dict[str, Any]:
        """The response; later ones can name it as their previous one."""
        (choice,) = result.choices
        self._session.keep_response(self._id, (*self._conversation, choice.message))
        is_cut = choice.finish_reason == "length"
        response = self._response(
            "incomplete" if is_cut else "completed", [item for item, _ in self._items(choice)]
        )
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        num_input, num_output = result.num_prompt_tokens, result.num_tokens
        response["usage"] = {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }
        if self._request.return_token_ids:
            response |= {
                "prompt_token_ids": list(result.prompts[0]),
                "token_ids": list(choice.output.token_ids),
            }
        return response

    def begin(self) -> Iterator[dict[str, Any]]:
        """Events before the first text."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", []))

    def piece(self, index: int, text: str) -> Iterator[dict[str, Any]]:
        """The events of some more text; the first ones open its item."""
        location = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        if not self._text:
            item = {**self._message("", "in_progress", None), "content": []}
            yield self._event("response.output_item.added", output_index=0, item=item)
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._event("response.content_part.added", **location, part=part)
        self._text += text
        yield self._event("response.output_text.delta", **location, delta=text, logprobs=[])

    def end(self, result: CompletionResult) -> Iterator[dict[str, Any]]:
        """Events after the last text."""
        (choice,) = result.choices
        for number, (item, is_message) in enumerate(self._items(choice)):
            if is_message:
                if not self._text:
                    yield from self.piece(0, "")
                location = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
                (part,) = item["content"]
                yield self._event("response.output_text.done", **location, text=part["text"], logprobs=[])
                yield self._event("response.content_part.done", **location, part=part)
            else:
                opened = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("response.output_item.added", output_index=number, item=opened)
                location_of_call = {"item_id": item["id"], "output_index": number}
                yield self._event(
                    "response.function_call_arguments.delta", **location_of_call, delta=item["arguments"]
                )
                yield self._event(
                    "response.function_call_arguments.done",
                    **location_of_call,
                    name=item["name"],
                    arguments=item["arguments"],
                )
            yield self._event("response.output_item.done", output_index=number, item=item)
        response = self.whole(result)
        yield self._event(f"response.{response['status']}", response=response)

    def _items(self, choice: Choice) -> list[tuple[dict[str, Any], bool]]:
        """The items of an answer, each with True for its message."""
        message, items = choice.message, []
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        if message.content or not message.calls:
            items.append((self._message(message.content, status, choice), True))
        for call in message.calls:
            item = {
                "type": "function_call",
                "id": f"fc_{call.id.removeprefix('call_')}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
            items.append((item, False))
        return items

    def _message(self, text: str, status: str, choice: Choice | None) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if self._request.logprobs and choice is not None:
            output = choice.output
            part["logprobs"] = logprobs_of(output.token_ids, output.log_probs, self._session.model)
        return {
            "type": "message",
            "id": self._item_id,
            "status": status,
            "role": "assistant",
            "content": [part],
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "model": self._session.model.name,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "temperature": body.get("temperature"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "max_output_tokens": body.get("max_output_tokens"),
        }

    def _event(self, kind: str, **facts: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **facts}
