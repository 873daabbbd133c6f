"""/v1/chat/completions and /v1/completions: answers in OpenAI's form, whole and as streams of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from strop.agents.openai_server.chat_model import ChatModel
from strop.agents.openai_server.completion import Choice, CompletionResult
from strop.agents.openai_server.request import CallRequest
from strop.agents.openai_server.token_bytes import text_offsets, token_bytes


class CompletionFormat:
    """Format of one call's answer: `whole`, or in a stream `begin`, `piece` for each piece of text, and `end`."""

    def __init__(self, request: CallRequest, model: ChatModel) -> None:
        self._request, self._model = request, model
        self._id = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._started: set[int] = set()

    def whole(self, result: CompletionResult) -> dict[str, Any]:
        """The answer to a call without stream."""
        request = self._request
        body = self._body([self._choice(choice) for choice in result.choices])
        if request.return_token_ids and request.is_chat:
            body["prompt_token_ids"] = list(result.prompts[0])
        return body | {"usage": usage(result)}

    def begin(self) -> Iterator[dict[str, Any]]:
        """Events before the first text: none."""
        return iter(())

    def piece(self, index: int, text: str) -> Iterator[dict[str, Any]]:
        """The event of some more text of a choice."""
        if not self._request.is_chat:
            choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
            yield self._event([choice])
            return
        yield self._delta(index, {"content": text})

    def end(self, result: CompletionResult) -> Iterator[dict[str, Any]]:
        """The events after the last text: calls, log-probs, finish reason, and token counts."""
        for choice in result.choices:
            yield self._last_event(choice)
        if self._request.counts_usage:
            yield self._event([]) | {"usage": usage(result)}

    def _last_event(self, choice: Choice) -> dict[str, Any]:
        fields = self._choice(choice)
        if not self._request.is_chat:
            return self._event([fields | {"text": ""}])
        message = fields.pop("message")
        delta = {key: value for key, value in message.items() if key == "reasoning_content"}
        if choice.message.calls:
            delta["tool_calls"] = [
                {"index": number, **call} for number, call in enumerate(message["tool_calls"])
            ]
        event = self._delta(choice.index, delta)
        event["choices"][0] |= fields
        if self._request.return_token_ids:
            event["prompt_token_ids"] = list(choice.prompt_ids)
        return event

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        if index not in self._started:
            self._started.add(index)
            delta = {"role": "assistant", "content": "", **delta}
        return self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body(choices)
        return body | ({"object": "chat.completion.chunk"} if self._request.is_chat else {})

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion" if self._request.is_chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        request, output = self._request, choice.output
        fields: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
        if request.is_chat:
            fields["message"] = _message(choice)
            content = logprobs_of(output.token_ids, output.log_probs, self._model)
            fields["logprobs"] = {"content": content, "refusal": None} if request.logprobs else None
        else:
            fields["text"] = choice.message.content
            fields["logprobs"] = self._completion_logprobs(choice) if request.logprobs else None
        if request.return_token_ids:
            fields["token_ids"] = list(output.token_ids)
            if not request.is_chat:
                fields["prompt_token_ids"] = list(choice.prompt_ids)
        return fields

    def _completion_logprobs(self, choice: Choice) -> dict[str, Any]:
        parts = token_bytes(self._model.tokenizer, choice.output.token_ids)
        return {
            "tokens": [part.decode(errors="replace") for part in parts],
            "token_logprobs": list(choice.output.log_probs),
            "text_offset": text_offsets(parts),
            "top_logprobs": None,
        }


def logprobs_of(
    token_ids: Sequence[int], log_probs: Sequence[float], model: ChatModel
) -> list[dict[str, Any]]:
    """Each sampled token with its log-prob, in OpenAI's form."""
    parts = token_bytes(model.tokenizer, token_ids)
    return [
        {
            "token": part.decode(errors="replace"),
            "logprob": log_prob,
            "bytes": list(part),
            "top_logprobs": [],
        }
        for part, log_prob in zip(parts, log_probs, strict=True)
    ]


def usage(result: CompletionResult) -> dict[str, int]:
    """Token counts of a call."""
    num_prompt, num_completion = result.num_prompt_tokens, result.num_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def _message(choice: Choice) -> dict[str, Any]:
    message = choice.message
    fields: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if choice.reasoning:
        fields["reasoning_content"] = choice.reasoning
    if message.calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return fields
