"""Client of somebody else's model, as agents use it: one POST for each answer.

Concurrency: requests run in the thread of `strop.utils.http_client.Caller`; every one ends within its limits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strop.protocol.trajectory import media_of
from strop.rollout.openai.byte_tokenizer import Speech
from strop.rollout.openai.config import OpenAIConfig
from strop.rollout.types import OnToken, Sampling, StopReason, TokenOutput
from strop.utils.http_client import Called, Caller, CallRefused
from strop.utils.sanitize import encodable_value, storable_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_COUNT = 10**9
"""Tokens of one answer; a larger count is none."""
_REASONS: Mapping[str, StopReason] = {"length": "length", "max_tokens": "length"}
_SEED_BITS = 31


class EndpointFailed(RuntimeError):
    """The server gave no answer; the sentence says why."""


class Endpoint:
    """Keeps `strop.rollout.client.GenerateClient`. Use `start` and `close` around it."""

    def __init__(
        self, config: OpenAIConfig, tokenizer: PreTrainedTokenizerBase, *, timeout_s: float, max_tokens: int
    ) -> None:
        """Args:
        config: where and how to ask.
        tokenizer: of the token ids that agents give: that of the speech module, or with api=completions the model's.
        timeout_s: rollout.timeout_s.
        max_tokens: most tokens of an answer, as the server counts them.
        """
        config.check()
        self._config, self._tokenizer, self._max_tokens = config, tokenizer, max_tokens
        self._speech = Speech(tokenizer) if config.api == "chat" else None
        self._caller = Caller(
            config,
            config.base_url.rstrip("/") + ("/chat/completions" if self._speech else "/completions"),
            key="rollout.openai",
            name="endpoint",
            timeout_s=timeout_s,
            timeout_key="rollout.timeout_s",
        )
        self._cause = ""  # why nothing is asked any more
        self._has_answered = False
        self.usage: Counter[str] = Counter()
        """requests, retries, input_tokens and output_tokens so far."""

    @property
    def max_episodes(self) -> int:
        """Episodes that are worth playing at the same time: others would wait, and their time would run."""
        return self._config.max_concurrent

    def start(self) -> None:
        """Read the key and start the thread; raises a ValueError where there is no such key."""
        self._caller.start()

    async def close(self) -> None:
        """End what is under way."""
        await self._caller.close()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """The answer of the server; `on_token` hears of it when it is whole. Log-probs are 0 where none are told.

        Raises:
            EndpointFailed: no attempt succeeded; where none ever did, later requests are not sent.
            ValueError: the server refuses this request, or it has images.
        """
        if media_of(prompt_ids):
            raise ValueError(f"request {request_id} has images, which rollout.engine=openai does not send")
        request = self._request(prompt_ids, sampling) | self._config.extra_body
        sent = {name: value for name, value in request.items() if value is not None}
        body = json.dumps(encodable_value(sent)).encode()
        try:
            called = await self._caller.run(self._ask(body))
        except CallRefused as refused:
            self._count(refused.usage)
            if refused.kind == "error":
                raise ValueError(str(refused)) from refused
            raise EndpointFailed(str(refused)) from refused
        self._count(called.usage)
        output = self._output(called, sampling)
        if on_token is not None:
            for token, log_prob, version in zip(
                output.token_ids, output.log_probs, output.versions, strict=True
            ):
                on_token(token, log_prob, version)
        return output

    async def _ask(self, body: bytes) -> Called:
        """In the caller's loop: who waits for a place there hears of a failure before it is asked for."""
        try:
            called = await self._caller.ask(body, read=self._read, refusal=lambda: self._cause)
        except CallRefused as refused:
            if refused.kind != "error" and not self._has_answered and not self._cause:
                self._cause = f"is not asked any more, because it never answered: {refused}"
            raise
        self._has_answered = True
        return called

    def _count(self, usage: Mapping[str, float]) -> None:
        self.usage.update({name: int(usage.get(name, 0)) for name in ("requests", "retries")})

    def _request(self, prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        options: dict[str, Any] = {
            "model": self._config.model,
            "temperature": sampling.temperature,
            "max_tokens": min(self._max_tokens, sampling.max_tokens),
        }
        if sampling.temperature > 0:
            options["seed"] = sampling.key >> (64 - _SEED_BITS)
        if sampling.top_p < 1:
            options["top_p"] = sampling.top_p
        if sampling.top_k:
            options["top_k"] = sampling.top_k
        if self._speech is None:
            stops = list(sampling.stop_token_ids)
            exact = {"logprobs": 0, "return_token_ids": True, "stop_token_ids": stops}
            return options | exact | {"prompt": list(prompt_ids)}
        spoken = self._speech.read(prompt_ids)
        return options | {"messages": spoken.messages} | ({"tools": spoken.tools} if spoken.tools else {})

    def _read(self, data: object) -> Any:
        """The parts of an answer that are used.

        Raises:
            ValueError: it is none.
        """
        choices = data.get("choices") if isinstance(data, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices else None
        if isinstance(choice, dict):
            if self._speech is None and isinstance(choice.get("text"), str):
                return data, choice
            message = choice.get("message")
            if self._speech is not None and isinstance(message, dict) and _calls(message) is not None:
                return data, choice
        kind = "completion" if self._speech is None else "chat completion"
        raise ValueError(f"sent no {kind}: {storable_text(json.dumps(data))[:200]}")

    def _output(self, called: Called, sampling: Sampling) -> TokenOutput:
        data, choice = called.data
        usage = data.get("usage")
        for ours, name in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
            count = usage.get(name) if isinstance(usage, dict) else None
            if type(count) is int and 0 <= count <= _MAX_COUNT:
                self.usage[ours] += count
        reason = _REASONS.get(str(choice.get("finish_reason")), "stop")
        if self._speech is None:
            ids, log_probs = self._tokens(choice, sampling, reason)
        else:
            message = choice["message"]
            text = message.get("content") or message.get("refusal") or ""
            ids = self._speech.write(str(text), _calls(message) or (), is_whole=reason == "stop")
            log_probs = [0.0] * len(ids)
        if len(ids) > sampling.max_tokens:
            ids, log_probs, reason = ids[: sampling.max_tokens], log_probs[: sampling.max_tokens], "length"
        return TokenOutput(
            token_ids=tuple(ids), log_probs=tuple(log_probs), versions=(0,) * len(ids), stop_reason=reason
        )

    def _tokens(
        self, choice: Mapping[str, Any], sampling: Sampling, reason: StopReason
    ) -> tuple[list[int], list[float]]:
        """The server's tokens and log-probs where it tells them; else its text, encoded here."""
        ids = choice.get("token_ids")
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
            ids = list(self._tokenizer(choice["text"], add_special_tokens=False)["input_ids"])
            ids += sampling.stop_token_ids[:1] if reason == "stop" else ()
        logprobs = choice.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        is_told = isinstance(values, list) and len(values) == len(ids)
        if is_told and all(isinstance(value, float | int) and -1e4 < value <= 0 for value in values or ()):
            return ids, [float(value) for value in values or ()]
        return ids, [0.0] * len(ids)


def _calls(message: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """Name and arguments of each call; None where the message is none."""
    calls = message.get("tool_calls") or []
    content = message.get("content")
    if not isinstance(calls, list) or not (content is None or isinstance(content, str)):
        return None
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments", "") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, str | dict):
            return None
        parsed.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return parsed
