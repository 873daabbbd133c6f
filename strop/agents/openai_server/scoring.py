"""Scoring of prompts without sampling: `echo` of /v1/completions, with which evaluation harnesses compare texts.

    {"prompt": [[1, 2, 3], ...] or text, "echo": true, "logprobs": 1, "max_tokens": 0 or 1, "temperature": 0}

Each prompt comes back with the log-prob of each of its tokens given those before it, and the most likely token in that
place. Nothing is sampled, so nothing is recorded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.agents.openai_server.errors import unsupported
from strop.agents.openai_server.request import read_prompts
from strop.agents.openai_server.token_bytes import text_offsets, token_bytes

if TYPE_CHECKING:
    from strop.agents.openai_server.chat_model import ChatModel

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
class PromptScores:
    """Log-probs of a prompt of n tokens."""

    log_probs: tuple[float, ...]
    """[n - 1] of its tokens from the second one on."""
    top_ids: tuple[int, ...]
    """[n] the most likely token in the place of each from the second one on, and after the last one."""
    top_log_probs: tuple[float, ...]
    """[n] log-probs of `top_ids`."""


@dataclass(frozen=True, kw_only=True)
class ScoringRequest:
    """One call."""

    prompts: tuple[str | tuple[int, ...], ...]
    names_top: bool
    """The most likely tokens are wanted too."""
    adds_token: bool
    """The most likely next token comes after the prompt."""


def read_scoring(body: object) -> ScoringRequest | None:
    """A request of /v1/completions with echo; None for one without.

    Raises:
        ApiError: 400, which parameter cannot be served, and why.
    """
    if not isinstance(body, Mapping) or body.get("echo") is not True:
        return None
    params = {str(name): value for name, value in body.items() if value is not None}
    for name in params:
        if name not in _KNOWN:
            raise unsupported(name, f"with echo this server knows {', '.join(sorted(_KNOWN))}")
    logprobs, max_tokens = params.get("logprobs"), params.get("max_tokens", 0)
    if type(logprobs) is not int or logprobs not in (0, 1):
        raise unsupported("logprobs", "with echo it is 0, or 1 for the most likely token in each place")
    if type(max_tokens) is not int or max_tokens not in (0, 1):
        raise unsupported(
            "max_tokens", "with echo it is 0 or 1: the prompt is scored; continue it without echo"
        )
    if max_tokens and params.get("temperature", 0) != 0:
        raise unsupported("temperature", "with echo the token after the prompt is the most likely one; use 0")
    if params.get("n", 1) != 1 or params.get("stream"):
        raise unsupported("n" if params.get("n", 1) != 1 else "stream", "a prompt is scored once, as a whole")
    prompts = read_prompts(params.get("prompt"))
    return ScoringRequest(prompts=prompts, names_top=logprobs == 1, adds_token=max_tokens == 1)


def scoring_body(
    request: ScoringRequest,
    prompts: Sequence[Sequence[int]],
    scores_of_prompts: Sequence[PromptScores],
    model: ChatModel,
) -> dict[str, Any]:
    """The answer in OpenAI's form; `prompts` are the token ids of those that were asked for."""
    num_prompt = sum(map(len, prompts))
    num_added = len(prompts) if request.adds_token else 0
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
        "choices": [
            _choice(index, request, prompt, scores, model)
            for index, (prompt, scores) in enumerate(zip(prompts, scores_of_prompts, strict=True))
        ],
        "usage": {
            "prompt_tokens": num_prompt, "completion_tokens": num_added, "total_tokens": num_prompt + num_added
        },
    }  # fmt: skip


def _choice(
    index: int, request: ScoringRequest, prompt: Sequence[int], scores: PromptScores, model: ChatModel
) -> dict[str, Any]:
    token_ids, log_probs = list(prompt), [None, *scores.log_probs]
    if request.adds_token:
        token_ids.append(scores.top_ids[-1])
        log_probs.append(scores.top_log_probs[-1])
    parts = token_bytes(model.tokenizer, token_ids)
    texts, top_texts = (
        [part.decode(errors="replace") for part in parts_of]
        for parts_of in (parts, token_bytes(model.tokenizer, scores.top_ids))
    )
    tops: list[dict[str, float] | None] = [None]
    for index_before, (token, log_prob) in enumerate(zip(token_ids[1:], log_probs[1:], strict=True)):
        top, value = scores.top_ids[index_before], scores.top_log_probs[index_before]
        if top == token:  # the same number, so that a client may compare
            log_probs[index_before + 1] = log_prob = value
        tops.append(_by_text((texts[index_before + 1], log_prob), (top_texts[index_before], value)))
    return {
        "index": index,
        "text": b"".join(parts).decode(errors="replace"),
        "finish_reason": "length",
        "logprobs": {
            "tokens": texts,
            "token_logprobs": log_probs,
            "text_offset": text_offsets(parts),
            "top_logprobs": tops if request.names_top else None,
        },
    }


def _by_text(token: tuple[str, float | None], top: tuple[str, float]) -> dict[str, float]:
    """The likelier number where two tokens have the same text."""
    assert token[1] is not None, "the first token alone has none"
    return (
        {token[0]: token[1], top[0]: max(top[1], token[1])}
        if token[0] == top[0]
        else {token[0]: token[1], top[0]: top[1]}
    )
