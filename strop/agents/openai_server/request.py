"""Parsed requests: messages or prompts, and options; a parameter that is not served is refused by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.agents.openai_server.errors import invalid, unsupported
from strop.agents.openai_server.messages import Message, read_messages, read_tools
from strop.utils.sanitize import encodable_value, real

MAX_CHOICES = 128
MAX_PROMPTS = 1024
"""Of one call of /v1/completions; with several choices of each prompt, the most answers."""
_MAX_STOPS = 16
_MAX_STOP_TOKENS = 256

# Parameters that change nothing of the answer.
_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "include", "stream_options",
})  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "modalities": (["text"],),
    "response_format": ({"type": "text"},), "parallel_tool_calls": (True,), "top_logprobs": (0,), "best_of": (1,),
    "echo": (False,), "suffix": ("",), "background": (False,), "truncation": ("disabled", "auto"),
    "text": ({}, {"format": {"type": "text"}}), "functions": ([],),
    # Of vLLM and SGLang, which clients for their servers send beside the settings that a model card recommends.
    "min_p": (0,), "repetition_penalty": (1,), "length_penalty": (1,), "min_tokens": (0,), "ignore_eos": (False,),
    "use_beam_search": (False,), "bad_words": ([],), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "add_generation_prompt": (True,), "continue_final_message": (False,),
}  # fmt: skip
"""Parameters that are served with these values alone."""
_REASONS = {
    "top_logprobs": "engines report the log-prob of the sampled token alone",
    "response_format": "answers are sampled freely, as they are trained",
    "text": "answers are sampled freely, as they are trained",
    "parallel_tool_calls": "the model decides how many calls it writes",
}
_SAMPLING = frozenset(
    {"model", "temperature", "top_p", "top_k", "seed", "stream", "return_token_ids", "stop_token_ids"}
)
_CHAT = _SAMPLING | {
    "messages", "max_tokens", "max_completion_tokens", "n", "stop", "logprobs", "tools", "tool_choice",
}  # fmt: skip
_COMPLETION = _SAMPLING | {"prompt", "max_tokens", "n", "stop", "logprobs"}
_RESPONSE = _SAMPLING | {
    "input", "instructions", "max_output_tokens", "previous_response_id", "tools", "tool_choice",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sampling options of a call; None: the server's."""

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts before which an answer ends."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, beside those of the model."""


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """One call."""

    options: Options
    messages: tuple[Message, ...] = ()
    """Of a chat."""
    tools: tuple[dict[str, Any], ...] = ()
    reads_calls: bool = False
    """Calls in the answer are parsed for the client."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Of a completion, each text or token ids; the answers to one are those that it gets alone."""
    is_chat: bool = True
    stream: bool = False
    counts_usage: bool = False
    """A stream ends with the numbers of tokens."""
    logprobs: bool = False
    return_token_ids: bool = False


def read_chat(body: object) -> CallRequest:
    """A request of /v1/chat/completions.

    Raises:
        ApiError: 400, which parameter cannot be served, and why.
    """
    params = _parameters(body, _CHAT)
    limit = "max_completion_tokens" if "max_completion_tokens" in params else "max_tokens"
    return dataclasses.replace(
        _common_request(params, limit),
        messages=read_messages(params.get("messages")),
        logprobs=_flag(params, "logprobs"),
        **_tool_fields(params),
    )


def read_completion(body: object) -> CallRequest:
    """A request of /v1/completions; raises as `read_chat`."""
    params = _parameters(body, _COMPLETION)
    prompts, logprobs = read_prompts(params.get("prompt")), params.get("logprobs")
    if logprobs is not None and (type(logprobs) is not int or logprobs != 0):
        raise unsupported("logprobs", f"{_REASONS['top_logprobs']}; use 0")
    request = _common_request(params, "max_tokens")
    if request.options.n * len(prompts) > MAX_PROMPTS:
        raise invalid(
            "n", f"is {request.options.n} for {len(prompts)} prompts; use at most {MAX_PROMPTS} answers"
        )
    return dataclasses.replace(request, prompts=prompts, is_chat=False, logprobs=logprobs is not None)


def read_prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """The prompts of a completion: a text or a list of token ids, or a list of these.

    Raises:
        ApiError: 400, it is neither.
    """
    value = encodable_value(value)
    is_single = isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int)
    prompts = [value] if is_single else value
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid("prompt", f"must be a text, a list of token ids, or up to {MAX_PROMPTS} of either")
    for prompt in prompts:
        is_ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise invalid(
                "prompt", "has an entry that is neither a text nor a list of token ids, or is empty"
            )
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts)


def read_response(body: Any, messages: tuple[Message, ...]) -> CallRequest:
    """A request of /v1/responses, whose messages were read; raises as `read_chat`."""
    params = _parameters(body, _RESPONSE)
    include = body.get("include") or []
    return dataclasses.replace(
        _common_request(params, "max_output_tokens"),
        messages=messages,
        logprobs="message.output_text.logprobs" in include,
        **_tool_fields(params),
    )


def _parameters(body: object, known_names: frozenset[str]) -> dict[str, Any]:
    """The parameters other than null; raises where one is not served."""
    if not isinstance(body, Mapping):
        raise invalid("body", "must be a JSON object")
    params = {str(name): value for name, value in body.items() if value is not None}
    for name, value in params.items():
        if name in known_names or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            raise unsupported(name, f"this server knows {', '.join(sorted(known_names))}")
        if value not in _NEUTRAL[name]:
            served = " or ".join(repr(neutral) for neutral in _NEUTRAL[name])
            raise unsupported(name, _REASONS.get(name, f"{str(value)[:60]!r} is not served, {served} is"))
    return params


def _common_request(params: Mapping[str, Any], limit: str) -> CallRequest:
    """A request with the parameters that all kinds of calls share."""
    stream_options = params.get("stream_options")
    options = Options(
        n=_whole(params, "n", 1, MAX_CHOICES) or 1,
        temperature=_number(params, "temperature", 2),
        top_p=_number(params, "top_p", 1, above=True),
        top_k=0 if params.get("top_k") == -1 else _whole(params, "top_k", 0),  # -1: vLLM's word for off
        max_tokens=_whole(params, limit, 1),
        seed=_whole(params, "seed", None),
        stop=_stops(params.get("stop")),
        stop_token_ids=_stop_tokens(params.get("stop_token_ids")),
    )
    return CallRequest(
        options=options,
        stream=_flag(params, "stream"),
        counts_usage=isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
        return_token_ids=_flag(params, "return_token_ids"),
    )


def _tool_fields(params: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an Ask about tools."""
    tools = tuple(read_tools(params.get("tools")))
    choice = params.get("tool_choice", "auto" if tools else "none")
    if choice not in ("auto", "none"):
        raise unsupported("tool_choice", f"{str(choice)[:60]!r} needs constrained sampling; use auto or none")
    return {"tools": tools, "reads_calls": bool(tools) and choice == "auto"}


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name, False)
    if not isinstance(value, bool):
        raise invalid(name, f"is {str(value)[:60]!r}; use true or false")
    return value


def _whole(params: Mapping[str, Any], name: str, least: int | None, most: int | None = None) -> int | None:
    value = params.get(name)
    if value is None:
        return None
    if type(value) is not int or (least is not None and value < least) or (most is not None and value > most):
        bounds = "" if least is None else f" from {least}" + ("" if most is None else f" to {most}")
        raise invalid(name, f"is {str(value)[:60]!r}; use a whole number{bounds}")
    return value


def _number(params: Mapping[str, Any], name: str, most: float, *, above: bool = False) -> float | None:
    if params.get(name) is None:
        return None
    value = None if isinstance(params[name], bool | str) else real(params[name])
    if value is None or not 0 <= value <= most or (above and value == 0):
        raise invalid(name, f"is {str(params[name])[:60]!r}; use a number from 0 to {most:g}")
    return value


def _stop_tokens(value: object) -> tuple[int, ...]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise invalid("stop_token_ids", "must be a list of token ids")
    if len(ids) > _MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"has {len(ids)} tokens; use at most {_MAX_STOP_TOKENS}")
    return tuple(ids)


def _stops(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise invalid("stop", "must be a text, or a list of texts, none of them empty")
    if len(texts) > _MAX_STOPS:
        raise invalid("stop", f"has {len(texts)} texts; use at most {_MAX_STOPS}")
    return tuple(texts)
