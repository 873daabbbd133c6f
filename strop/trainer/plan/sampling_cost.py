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

ROWS, VOCAB, LARGE_VOCAB = 32, 512, 2**17 + 1
"""Of the logits that are sampled from; the large one of an accelerator, which adds up blocks of a row."""
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


def sampling_cost(
    sampling: Sampling, compute_dtype: torch.dtype, *, is_accelerator: bool = False
) -> SamplingCost:
    """Bytes of sampling from logits that a model of this precision has."""
    one = dataclasses.replace(sampling, max_tokens=1)
    dtype = torch.promote_types(compute_dtype, torch.float32)
    is_whole = sampling.temperature == 0 or (sampling.top_k == 0 and sampling.top_p >= 1)
    if is_accelerator and is_whole and dtype == torch.float32:
        return SamplingCost(held=LEAST_HELD * dtype.itemsize, moved=LEAST_MOVED * dtype.itemsize)
    return _seen(one, dtype, is_accelerator)


@lru_cache
def _seen(sampling: Sampling, dtype: torch.dtype, is_accelerator: bool) -> SamplingCost:
    """By the operators of the engine's own function on a few logits, which have no numbers where they stand for those
    of an accelerator: the same on every machine. What top-k and top-p cut is sorted."""
    device, vocab = ("meta", LARGE_VOCAB) if is_accelerator else ("cpu", VOCAB)
    rows = np.zeros(ROWS, dtype=SEQUENCE)
    for name in ("key", "temperature", "top_p", "top_k"):
        rows[name] = getattr(sampling, name)
    recorder = Recorder()
    with torch.no_grad(), recorder:
        next_tokens(torch.zeros(ROWS, vocab, dtype=dtype, device=device), rows)
    count = ROWS * vocab
    return SamplingCost(
        held=max(LEAST_HELD * dtype.itemsize, recorder.peak / count),
        moved=max(LEAST_MOVED * dtype.itemsize, recorder.work.moved_bytes / count),
    )
