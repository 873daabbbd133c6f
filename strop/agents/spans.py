"""What happened in an episode, and when: answers of the model and calls of tools, for whoever listens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

SpanKind = Literal["answer", "tool", "reward"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One thing that took time."""

    kind: SpanKind
    name: str
    start_s: float
    """Seconds since the epoch."""
    end_s: float
    facts: Mapping[str, Any]
    """answer: num_prompt_tokens, token_ids, stop_reason. tool: arguments, result, error.
    reward: outcome (a word), score."""


SPANS: ContextVar[list[Span] | None] = ContextVar("spans", default=None)
"""Those of the episode that is played in this context; None where nobody listens."""


def add_span(spans: list[Span] | None, kind: SpanKind, name: str, seconds: float, **facts: Any) -> None:
    """Note what has just ended.

    Args:
        spans: of its episode; None: nobody listens.
        kind, name, facts: see Span.
        seconds: how long it took.
    """
    if spans is not None:
        end = time.time()
        spans.append(Span(kind=kind, name=name, start_s=end - seconds, end_s=end, facts=facts))
