"""Checks of a request before engines in processes of their own take it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from strop.engines.multimodal.vl_model import Reader
from strop.protocol.trajectory import media_of
from strop.rollout.requests import check_request
from strop.rollout.types import Sampling


def checked_prompt(
    request_id: str,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    engine: str,
    vocab_size: int,
    max_tokens: int,
    running: Container[str],
    reader: Reader | None = None,
) -> list[int]:
    """The prompt of a request to an engine in another process.

    Args:
        request_id, prompt_ids, sampling: of the request.
        engine: its name, for errors.
        vocab_size: of the model.
        max_tokens: of prompt and response, that the engine was started for.
        running: ids of requests.
        reader: of the media that it is given; None for none.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, too many tokens, an id that is already running, or
            media that it is not given or that do not fit the tokens.
    """
    prompt = list(prompt_ids)
    check_request(request_id, prompt, vocab_size=vocab_size, running=running)
    if len(prompt) + sampling.max_tokens > max_tokens:
        raise ValueError(
            f"request {request_id} has {len(prompt)} prompt tokens and may generate {sampling.max_tokens}, but "
            f"{engine} was started for {max_tokens} tokens; raise data.max_prompt_tokens or data.max_response_tokens, "
            f"which this follows from"
        )
    media = media_of(prompt_ids)
    if reader is not None:
        reader.check(prompt, media, f"request {request_id}")
    elif media:
        raise ValueError(
            f"request {request_id} has {len(media)} images or videos, which the {engine} engine is not given for this "
            f"model; use a vision-language model with rollout.engine=native or vllm"
        )
    return prompt
