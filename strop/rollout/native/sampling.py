"""The next token of many rows at once.

A token is the inverse of its row's cumulative distribution at one uniform number, which depends only on
the request's key and the token's position: never on which other requests run beside it.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from strop.rollout.native.cpu import kernel
from strop.utils.device import sent
from strop.utils.rng import uniforms

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
"""Record of a running sequence in host memory: how it samples, and where it is."""

BLOCK = 1024
"""Probabilities that are added up apart on an accelerator."""


def next_tokens(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Sampled tokens [B] int64 and their log-probs [B] for unscaled logits [B, V]; advances the positions.

    Log-probs are those of the whole distribution at the row's temperature (1 where it is greedy), before
    top-k and top-p cut it.
    """
    sampled = kernel.sample(logits, rows["temperature"], rows["key"], rows["position"])
    if sampled is None:
        tokens, log_probs = _in_torch(logits, rows)
    else:
        tokens, log_probs = sampled
        is_whole = (rows["temperature"] == 0) | (rows["top_k"] == 0) & (rows["top_p"] >= 1.0)
        if not np.all(is_whole):  # a row's numbers do not depend on what others ask for
            tokens[~is_whole], log_probs[~is_whole] = _in_torch(logits[~is_whole], rows[~is_whole])
    rows["position"] += 1
    return tokens, log_probs


def _in_torch(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    temperature = rows["temperature"]
    if np.any(temperature != 1.0):
        divisor = sent(torch.from_numpy(np.where(temperature == 0, 1.0, temperature)), logits.device)
        logits = logits / divisor.to(logits.dtype)[:, None]
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
    u = sent(torch.from_numpy(uniforms(rows["key"], rows["position"])), probs.device)
    if probs.device.type == "cpu":
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        threshold = (u * cumulative[:, -1]).unsqueeze(-1)
        tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
        return tokens.clamp_(max=probs.shape[1] - 1)
    return invert_in_blocks(probs, u)


def invert_in_blocks(probs: Tensor, u: Tensor) -> Tensor:
    """Tokens [B] at which the cumulative sums of probs [B, V] pass u [B] times their total.

    The sums of blocks are added up first, then the numbers of one block: an accelerator adds up whole rows with one
    group of threads each, in float64, which takes as long as a layer.
    """
    vocab = probs.shape[1]
    num_blocks = -(-vocab // BLOCK)
    padded = F.pad(probs, (0, num_blocks * BLOCK - vocab))
    blocks = padded.view(len(probs), num_blocks, BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [B, blocks]
    threshold = (u * ends[:, -1])[:, None]
    block = torch.searchsorted(ends, threshold, right=True).clamp_(max=num_blocks - 1)  # [B, 1]
    chosen = blocks.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0]
    inside = chosen.cumsum(-1, dtype=torch.float64)
    rest = threshold - (ends.gather(1, block) - inside[:, -1:])
    # Never behind the last token that has a probability, however the sums were rounded.
    rest = torch.minimum(rest, inside[:, -1:] * (1 - 1e-12))
    offset = torch.searchsorted(inside, rest, right=True)
    return (block * BLOCK + offset)[:, 0].clamp_(max=vocab - 1)


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
