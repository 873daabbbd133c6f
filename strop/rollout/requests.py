"""What an engine in another process asks of a request before it is sent."""

from __future__ import annotations

from collections.abc import Container, Sequence

from strop.rollout.types import Sampling
from strop.trajectory import media_of


def checked_prompt(
    request_id: str,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    engine: str,
    vocab_size: int,
    max_tokens: int,
    running: Container[str],
) -> list[int]:
    """The prompt of a request.

    Args:
        request_id, prompt_ids, sampling: of the request.
        engine: its name, for errors.
        vocab_size: of the model.
        max_tokens: of prompt and response, that the engine was started for.
        running: ids of requests.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, too many tokens, an id that is already running, or
            media.
    """
    prompt = list(prompt_ids)
    if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
        raise ValueError(
            f"request {request_id} has {len(prompt)} prompt tokens between {min(prompt, default=0)} and "
            f"{max(prompt, default=0)}, but the model's vocabulary has {vocab_size}; is it the tokenizer of this model?"
        )
    if len(prompt) + sampling.max_tokens > max_tokens:
        raise ValueError(
            f"request {request_id} has {len(prompt)} prompt tokens and may generate {sampling.max_tokens}, but "
            f"{engine} was started for {max_tokens} tokens; raise data.max_prompt_tokens or data.max_response_tokens, "
            f"which this follows from"
        )
    if request_id in running:
        raise ValueError(f"request {request_id} is already running; give each request its own id")
    if media := media_of(prompt_ids):
        raise ValueError(
            f"request {request_id} has {len(media)} images or videos, which the {engine} engine is not given; use "
            f"rollout.engine=native"
        )
    return prompt
