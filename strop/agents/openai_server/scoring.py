"""Prompts that are scored and not continued: `echo` of /v1/completions, with which evaluation harnesses compare texts.

    {"prompt": [[1, 2, 3], ...] or text, "echo": true, "logprobs": 1, "max_tokens": 0 or 1, "temperature": 0}

Each prompt comes back with the log-prob of each of its tokens given those before it, and the most likely token in that
place. Nothing is sampled, so nothing is recorded.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.agents.openai_server.errors import unsupported
from strop.agents.openai_server.request import read_prompts

if TYPE_CHECKING:
    from strop.agents.openai_server.session import ChatModel

_KNOWN = frozenset(
    {
        "prompt",
        "echo",
        "logprobs",
        "max_tokens",
        "temperature",
        "seed",
        "model",
        "n",
        "stream",
        "stop",
        "user",
    }
)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What the model says of a prompt of n tokens."""

    log_probs: tuple[float, ...]
    """[n - 1] of its tokens from the second one on."""
    top_ids: tuple[int, ...]
    """[n] the most likely token in the place of each from the second one on, and after the last one."""
    top_log_probs: tuple[float, ...]
    """[n] of those."""


@dataclass(frozen=True, kw_only=True)
class ScoringAsk:
    """One call."""

    prompts: tuple[str | tuple[int, ...], ...]
    names_top: bool
    """The most likely tokens are wanted too."""
    adds_token: bool
    """The most likely next token comes after the prompt."""


def read_scoring(body: Any) -> ScoringAsk | None:
    """A request of /v1/completions with echo; None for one without.

    Raises:
        ApiError: 400, which parameter cannot be served, and why.
    """
    if not isinstance(body, Mapping) or body.get("echo") is not True:
        return None
    given = {str(name): value for name, value in body.items() if value is not None}
    for name in given:
        if name not in _KNOWN:
            raise unsupported(name, f"with echo this server knows {', '.join(sorted(_KNOWN))}")
    logprobs, max_tokens = given.get("logprobs"), given.get("max_tokens", 0)
    if type(logprobs) is not int or logprobs not in (0, 1):
        raise unsupported("logprobs", "with echo it is 0, or 1 for the most likely token in each place")
    if type(max_tokens) is not int or max_tokens not in (0, 1):
        raise unsupported(
            "max_tokens", "with echo it is 0 or 1: the prompt is scored; continue it without echo"
        )
    if max_tokens and given.get("temperature", 0) != 0:
        raise unsupported("temperature", "with echo the token after the prompt is the most likely one; use 0")
    if given.get("n", 1) != 1 or given.get("stream"):
        raise unsupported("n" if given.get("n", 1) != 1 else "stream", "a prompt is scored once, as a whole")
    prompts = read_prompts(given.get("prompt"))
    return ScoringAsk(prompts=prompts, names_top=logprobs == 1, adds_token=max_tokens == 1)


def scoring_body(
    ask: ScoringAsk, prompts: Sequence[Sequence[int]], scored: Sequence[Scored], model: ChatModel
) -> dict[str, Any]:
    """The answer in OpenAI's form; `prompts` are the token ids of those that were asked for."""
    num_prompt = sum(map(len, prompts))
    num_added = len(prompts) if ask.adds_token else 0
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
        "choices": [
            _choice(index, ask, prompt, one, model)
            for index, (prompt, one) in enumerate(zip(prompts, scored, strict=True))
        ],
        "usage": {
            "prompt_tokens": num_prompt, "completion_tokens": num_added, "total_tokens": num_prompt + num_added
        },
    }  # fmt: skip


def _choice(
    index: int, ask: ScoringAsk, prompt: Sequence[int], one: Scored, model: ChatModel
) -> dict[str, Any]:
    token_ids, log_probs = list(prompt), [None, *one.log_probs]
    if ask.adds_token:
        token_ids.append(one.top_ids[-1])
        log_probs.append(one.top_log_probs[-1])
    texts = [str(model.tokenizer.decode([token])) for token in token_ids]
    tops: list[dict[str, float] | None] = [None]
    for place, (token, log_prob) in enumerate(zip(token_ids[1:], log_probs[1:], strict=True)):
        top, value = one.top_ids[place], one.top_log_probs[place]
        if top == token:  # the same number, so that a client may compare
            log_probs[place + 1] = log_prob = value
        tops.append(_by_text((texts[place + 1], log_prob), (str(model.tokenizer.decode([top])), value)))
    return {
        "index": index,
        "text": "".join(texts),
        "finish_reason": "length",
        "logprobs": {
            "tokens": texts,
            "token_logprobs": log_probs,
            "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=0)),
            "top_logprobs": tops if ask.names_top else None,
        },
    }


def _by_text(own: tuple[str, float | None], top: tuple[str, float]) -> dict[str, float]:
    """The likelier number where two tokens have the same text."""
    assert own[1] is not None, "the first token alone has none"
    return (
        {own[0]: own[1], top[0]: max(top[1], own[1])}
        if own[0] == top[0]
        else {own[0]: own[1], top[0]: top[1]}
    )
