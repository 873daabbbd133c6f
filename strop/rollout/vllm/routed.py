"""Experts that tokens of a request were routed to, from the message of vLLM's process (inside/strop_routing.py)."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from strop.protocol.routed_experts import TOKEN_DTYPE, RoutedExperts


def routed_experts(message: Mapping[str, Any] | None, *, num_read: int, request_id: str) -> RoutedExperts:
    """Choices of the routers for the tokens of a request.

    Args:
        message: shape [n, L, k], name of a dtype of whole numbers, and the numbers in base64; None: nothing is known.
        num_read: tokens that the model read: prompt and response, but the last one.
        request_id: for the sentence.

    Raises:
        RuntimeError: the choices are those of another number of tokens.
    """
    num_tokens, num_layers, num_chosen = (0, 0, 0) if message is None else message["shape"]
    if message is None or num_tokens != num_read:
        raise RuntimeError(
            f"vLLM recorded the experts of {num_tokens} tokens of request {request_id}, but its model has read "
            f"{num_read}: use rollout.engine=native, or set rollout.router_replay=false"
        )
    numbers = np.frombuffer(base64.b64decode(message["data"]), dtype=message["dtype"])
    rows = numbers.astype(TOKEN_DTYPE).reshape(num_tokens, -1)
    return RoutedExperts(
        num_layers=num_layers, num_chosen=num_chosen, tokens=tuple(token.tobytes() for token in rows)
    )
