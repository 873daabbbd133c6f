"""Timed spans of an episode: answers of the model, calls of tools, rewards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

SpanKind = Literal["answer", "tool", "reward"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One timed operation."""

    kind: SpanKind
    name: str
    start_s: float
    """Seconds since the epoch."""
    end_s: float
    facts: Mapping[str, Any]
    """answer: num_prompt_tokens, token_ids, stop_reason. tool: arguments, result, error.
    reward: outcome (a word), score."""


SPANS: ContextVar[list[Span] | None] = ContextVar("spans", default=None)
"""Spans of the episode in this context; None where they are not recorded."""


def add_span(spans: list[Span] | None, kind: SpanKind, name: str, seconds: float, **facts: Any) -> None:
    """Append the span of an operation that has just ended.

    Args:
        spans: of its episode; None: not recorded.
        kind, name, facts: see Span.
        seconds: its duration.
    """
    if spans is not None:
        end = time.time()
        spans.append(Span(kind=kind, name=name, start_s=end - seconds, end_s=end, facts=facts))
