"""/v1/chat/completions and /v1/completions: answers in OpenAI's form, whole and as streams of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from strop.agents.openai_server.completion import Answered, Choice
from strop.agents.openai_server.request import Ask
from strop.agents.openai_server.session import ChatModel


class Form:
    """How one call is answered; `whole`, or `piece` for text as it comes and `end` after it."""

    def __init__(self, ask: Ask, model: ChatModel) -> None:
        self._ask, self._model = ask, model
        self._id = f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._begun: set[int] = set()

    def whole(self, answered: Answered) -> dict[str, Any]:
        """The answer to a call that is no stream."""
        ask = self._ask
        body = self._body([self._choice(one) for one in answered.choices])
        if ask.return_token_ids and ask.is_chat:
            body["prompt_token_ids"] = list(answered.prompts[0])
        return body | {"usage": usage(answered)}

    def begin(self) -> Iterator[dict[str, Any]]:
        """Events before the first text: none."""
        return iter(())

    def piece(self, index: int, text: str) -> Iterator[dict[str, Any]]:
        """The event of some more text of a choice."""
        if not self._ask.is_chat:
            choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
            yield self._event([choice])
            return
        yield self._delta(index, {"content": text})

    def end(self, answered: Answered) -> Iterator[dict[str, Any]]:
        """The events after the last text: calls, log-probs, why it ended, and the numbers of tokens."""
        for choice in answered.choices:
            yield self._last(choice)
        if self._ask.counts_usage:
            yield self._event([]) | {"usage": usage(answered)}

    def _last(self, choice: Choice) -> dict[str, Any]:
        made = self._choice(choice)
        if not self._ask.is_chat:
            return self._event([made | {"text": ""}])
        message = made.pop("message")
        delta = {key: value for key, value in message.items() if key == "reasoning_content"}
        if choice.message.calls:
            delta["tool_calls"] = [
                {"index": number, **call} for number, call in enumerate(message["tool_calls"])
            ]
        event = self._delta(choice.index, delta)
        event["choices"][0] |= made
        if self._ask.return_token_ids:
            event["prompt_token_ids"] = list(choice.prompt_ids)
        return event

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": "", **delta}
        return self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body(choices)
        return body | ({"object": "chat.completion.chunk"} if self._ask.is_chat else {})

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion" if self._ask.is_chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        ask, output = self._ask, choice.output
        made: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
        if ask.is_chat:
            made["message"] = _message(choice)
            content = logprobs_of(output.token_ids, output.log_probs, self._model)
            made["logprobs"] = {"content": content, "refusal": None} if ask.logprobs else None
        else:
            made["text"] = choice.message.content
            made["logprobs"] = self._completion_logprobs(choice) if ask.logprobs else None
        if ask.return_token_ids:
            made["token_ids"] = list(output.token_ids)
            if not ask.is_chat:
                made["prompt_token_ids"] = list(choice.prompt_ids)
        return made

    def _completion_logprobs(self, choice: Choice) -> dict[str, Any]:
        tokens = [self._model.tokenizer.decode([token]) for token in choice.output.token_ids]
        places = [len("".join(tokens[:number])) for number in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": list(choice.output.log_probs),
            "text_offset": places,
            "top_logprobs": None,
        }


def logprobs_of(
    token_ids: Sequence[int], log_probs: Sequence[float], model: ChatModel
) -> list[dict[str, Any]]:
    """Each sampled token with its log-prob, in OpenAI's form."""
    made = []
    for token, log_prob in zip(token_ids, log_probs, strict=True):
        text = str(model.tokenizer.decode([token]))
        made.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
    return made


def usage(answered: Answered) -> dict[str, int]:
    """The numbers of tokens."""
    asked, said = answered.num_prompt_tokens, answered.num_tokens
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _message(choice: Choice) -> dict[str, Any]:
    message = choice.message
    made: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if choice.reasoning:
        made["reasoning_content"] = choice.reasoning
    if message.calls:
        made["content"] = message.content or None
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return made
