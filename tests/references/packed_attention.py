"""Attention over a packed row, one query at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Segment = tuple[int, int, Sequence[tuple[int, int]]]
"""Start, length, and the [start, end) of each run that it continues, in order."""


def segment_of(token: int, segments: Sequence[Segment]) -> Segment:
    """The segment that holds the token."""
    return next(s for s in segments if s[0] <= token < s[0] + s[1])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    *,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[N, H, Dv]: each query looks at what its segment continues and at the segment, up to itself, the last `window`
    tokens."""
    n, heads, _ = query.shape
    per_key_head = heads // key.shape[1]
    rows = []
    for token in range(n):
        start, _, prefix = segment_of(token, segments)
        seen = [place for run in (*prefix, (start, token + 1)) for place in range(*run)]
        if window is not None:
            seen = seen[-window:]
        out = []
        for head in range(heads):
            scores = torch.stack([query[token, head] @ key[s, head // per_key_head] for s in seen]) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            total = scores.exp().sum() + (0.0 if sinks is None else sinks[head].exp())
            weights = scores.exp() / total
            out.append(sum(w * value[s, head // per_key_head] for w, s in zip(weights, seen, strict=True)))
        rows.append(torch.stack(out))
    return torch.stack(rows)
