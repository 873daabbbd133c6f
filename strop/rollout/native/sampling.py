"""The next token of many rows at once.

A token is the inverse of its row's cumulative distribution at one uniform number, which depends only on
the request's key and the token's position: never on which other requests run beside it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.base.guests import optional
from strop.base.randomness import uniforms
from strop.rollout.native.compiled import CompiledDecoding

Rows = NDArray[np.void]
"""Running sequences, a record of `SEQUENCE` for each; slices are views."""
SEQUENCE = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("key", np.uint64),
        ("position", np.int64),  # of the next number in the random stream
        ("length", np.int64),  # tokens in the cache
        ("shift", np.int64),  # position of the next token, less the length
        ("last", np.int64),  # token that was sampled last
    ]
)
"""What is kept of a running sequence in host memory: how it samples, and where it is."""


def next_tokens(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Sampled tokens [B] int64 and their log-probs [B] for unscaled logits [B, V]; advances the positions.

    Log-probs are those of the whole distribution at the row's temperature (1 where it is greedy), before
    top-k and top-p cut it.
    """
    compiled: CompiledDecoding | None = optional("compiled decoding")
    found = None
    if compiled is not None:
        found = compiled.sample(logits, rows["temperature"], rows["key"], rows["position"])
    if found is None:
        tokens, log_probs = _in_torch(logits, rows)
    else:
        tokens, log_probs = found
        is_whole = (rows["temperature"] == 0) | (rows["top_k"] == 0) & (rows["top_p"] >= 1.0)
        if not np.all(is_whole):  # a row's numbers do not depend on what others ask for
            tokens[~is_whole], log_probs[~is_whole] = _in_torch(logits[~is_whole], rows[~is_whole])
    rows["position"] += 1
    return tokens, log_probs


def _in_torch(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    temperature = rows["temperature"]
    if np.any(temperature != 1.0):
        divisor = torch.from_numpy(np.where(temperature == 0, 1.0, temperature)).to(logits)
        logits = logits / divisor[:, None]
    normalizer = torch.logsumexp(logits, dim=-1)
    if np.all(temperature == 0):
        tokens = logits.argmax(-1)
    else:
        tokens = _invert(_truncated_probs(logits, normalizer, rows), rows)
        if np.any(temperature == 0):
            greedy = torch.from_numpy(temperature == 0).to(logits.device)
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
    log_probs = logits.gather(-1, tokens[:, None])[:, 0] - normalizer
    return tokens, log_probs


def _invert(probs: Tensor, rows: Rows) -> Tensor:
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    u = torch.from_numpy(uniforms(rows["key"], rows["position"])).to(probs.device)
    threshold = (u * cumulative[:, -1]).unsqueeze(-1)
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[1] - 1)


def _truncated_probs(logits: Tensor, normalizer: Tensor, rows: Rows) -> Tensor:
    """Probabilities [B, V], with the tokens outside top-k and top-p at 0; not normalised again."""
    vocab = logits.shape[1]
    probs = torch.exp(logits - normalizer[:, None])
    top_k, top_p = rows["top_k"], rows["top_p"]
    if np.all(top_k == 0) and np.all(top_p >= 1.0):
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=probs.device)[None]
    limit = torch.from_numpy(np.where(top_k == 0, vocab, top_k)).to(probs.device)[:, None]
    ordered = torch.where(rank < limit, ordered, 0.0)
    # top-p is a share of what top-k left; the most likely token always stays.
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    share = torch.from_numpy(top_p).to(probs.device)[:, None] * ordered.sum(-1, True, dtype=torch.float64)
    ordered = torch.where((before < share) | (rank == 0), ordered, 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ordered)
