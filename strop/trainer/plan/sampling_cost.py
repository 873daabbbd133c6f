"""Memory and work of sampling a token from its logits, as the native engine does it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from strop.rollout.config import RolloutConfig
from strop.rollout.native.sampling import SEQUENCE, next_tokens
from strop.rollout.types import Sampling
from strop.trainer.plan.tracing import Recorder

ROWS, VOCAB = 32, 512
"""Of the logits that are sampled from."""
LEAST_HELD, LEAST_MOVED = 2, 4
"""Logits that are there together, and that are read and written, of a kernel that needs no tensors beside them."""


@dataclass(frozen=True, kw_only=True)
class SamplingCost:
    """Bytes for each logit."""

    held: float
    """At most, the logit among them."""
    moved: float
    """Read and written by operators."""


def sampling_of(rollout: RolloutConfig, *, max_tokens: int = 1) -> Sampling:
    """Sampling of a run."""
    return Sampling(
        key=1,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=max_tokens,
    )


def sampling_cost(sampling: Sampling, compute_dtype: torch.dtype) -> SamplingCost:
    """Bytes of sampling from logits that a model of this precision has."""
    one = dataclasses.replace(sampling, max_tokens=1)
    return _seen(one, torch.promote_types(compute_dtype, torch.float32))


@lru_cache
def _seen(sampling: Sampling, dtype: torch.dtype) -> SamplingCost:
    """By the operators of the engine's own function on a few logits; what top-k and top-p cut is sorted."""
    rows = np.zeros(ROWS, dtype=SEQUENCE)
    for name in ("key", "temperature", "top_p", "top_k"):
        rows[name] = getattr(sampling, name)
    recorder = Recorder()
    with torch.no_grad(), recorder:
        next_tokens(torch.zeros(ROWS, VOCAB, dtype=dtype), rows)
    count = ROWS * VOCAB
    return SamplingCost(
        held=max(LEAST_HELD * dtype.itemsize, recorder.peak / count),
        moved=max(LEAST_MOVED * dtype.itemsize, recorder.work.moved_bytes / count),
    )
