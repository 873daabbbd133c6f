"""The next token of many rows at once.

A token is the inverse of its row's cumulative distribution at one uniform number, which depends only on
the request's key and the token's position: never on which other requests run beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from strop.engines.parallel.vocabulary import VocabularyShard
from strop.rollout.native import sample_kernel
from strop.rollout.native.cpu import kernel
from strop.rollout.native.sample_kernel import BLOCK
from strop.utils.device import sent
from strop.utils.rng import uniforms
from strop.utils.triton import has_kernels

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


def next_tokens(
    logits: Tensor, rows: Rows, vocabulary: VocabularyShard | None = None
) -> tuple[Tensor, Tensor]:
    """Sampled tokens [B] int64 and their log-probs [B] for unscaled logits [B, V]; advances the positions.

    Log-probs are those of the whole distribution at the row's temperature (1 where it is greedy), before
    top-k and top-p cut it.

    Args:
        logits: of the whole vocabulary, or [B, v] of the part of it that this rank has.
        rows: how each is sampled.
        vocabulary: that part; all its ranks call this with the same rows, and get the same tokens.
    """
    if vocabulary is not None:
        tokens, log_probs = _over_ranks(logits, rows, vocabulary)
        rows["position"] += 1
        return tokens, log_probs
    sampled = kernel.sample(logits, rows["temperature"], rows["key"], rows["position"])
    if sampled is None:
        tokens, log_probs = _in_torch(logits, rows)
    else:
        tokens, log_probs = sampled
        is_cut = _is_cut(rows)
        if np.any(is_cut):  # a row's numbers do not depend on what others ask for
            tokens[is_cut], log_probs[is_cut] = _in_torch(logits[is_cut], rows[is_cut])
    rows["position"] += 1
    return tokens, log_probs


def _over_ranks(logits: Tensor, rows: Rows, vocabulary: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Tokens [B] and log-probs [B] of a vocabulary over several ranks, from a few numbers of each rank; all logits of
    those rows alone whose distribution top-k or top-p cuts."""
    logits = _scaled(logits, rows)
    normalizer = vocabulary.logsumexp(logits)
    picks = [partial(pick, vocabulary=vocabulary) for pick in (_likeliest, _drawn_of_cut, _drawn)]
    tokens = _picked(logits, normalizer, rows, picks)
    log_probs = vocabulary.at(logits, vocabulary.places(tokens)[:, None])[:, 0] - normalizer
    return tokens, log_probs


Pick = Callable[[Tensor, Tensor, Rows], Tensor]
"""Function of logits, normalizers and rows to tokens [B]."""


def _picked(logits: Tensor, normalizer: Tensor, rows: Rows, picks: Sequence[Pick]) -> Tensor:
    """Tokens [B], by one function for greedy rows, one for those whose distribution top-k or top-p cuts, and one for
    whole distributions: sums of each are rounded in another way, and a row's token depends on no other row."""
    is_greedy, is_cut = _is_greedy(rows), _is_cut(rows)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for chosen, pick in zip((is_greedy, is_cut, ~is_greedy & ~is_cut), picks, strict=True):
        if chosen.all():
            return pick(logits, normalizer, rows)
        if chosen.any():
            at = sent(torch.from_numpy(np.flatnonzero(chosen)), logits.device)
            tokens[at] = pick(logits[at], normalizer[at], rows[chosen])
    return tokens


def _likeliest(logits: Tensor, normalizer: Tensor, rows: Rows, vocabulary: VocabularyShard) -> Tensor:
    return vocabulary.top_k(logits, 1)[1][:, 0]


def _drawn_of_cut(logits: Tensor, normalizer: Tensor, rows: Rows, vocabulary: VocabularyShard) -> Tensor:
    return _invert(_truncated_probs(vocabulary.whole(logits), normalizer, rows), rows)


def _drawn(logits: Tensor, normalizer: Tensor, rows: Rows, vocabulary: VocabularyShard) -> Tensor:
    """The inverse of the distribution, of which each rank knows its tokens: where they begin and end among those of
    all ranks say the sums of the ranks."""
    cumulative = torch.exp(logits - normalizer[:, None]).cumsum(-1, dtype=torch.float64)
    masses = cumulative.new_zeros(len(rows)) if not vocabulary.size else cumulative[:, -1]
    ends = vocabulary.gather(masses).cumsum(0)  # [T, B]
    u = sent(torch.from_numpy(uniforms(rows["key"], rows["position"])), logits.device)
    threshold = u.clamp(max=1 - 1e-15) * ends[-1]
    owner = (ends <= threshold).sum(0)
    start = ends[vocabulary.rank] - masses
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    if vocabulary.size:
        place = torch.searchsorted(cumulative, (threshold - start)[:, None], right=True)[:, 0]
        tokens = vocabulary.first + place.clamp_(max=vocabulary.size - 1)
    return vocabulary.total(torch.where(owner == vocabulary.rank, tokens, 0))


def _scaled(logits: Tensor, rows: Rows) -> Tensor:
    """Logits divided by each row's temperature; by 1 where it is greedy."""
    divisors = _divisors(rows)
    if np.all(divisors == 1.0):
        return logits
    return logits / sent(torch.from_numpy(divisors), logits.device).to(logits.dtype)[:, None]


def _divisors(rows: Rows) -> NDArray[np.float64]:
    return np.where(rows["temperature"] == 0, 1.0, rows["temperature"])


def _is_greedy(rows: Rows) -> NDArray[np.bool_]:
    is_greedy: NDArray[np.bool_] = rows["temperature"] == 0
    return is_greedy


def _is_cut(rows: Rows) -> NDArray[np.bool_]:
    """Top-k or top-p cuts the row's distribution."""
    is_cut: NDArray[np.bool_] = ~_is_greedy(rows) & ((rows["top_k"] > 0) | (rows["top_p"] < 1.0))
    return is_cut


def _in_torch(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    if has_kernels(logits.device) and logits.dtype == torch.float32 and logits.stride(1) == 1:
        return _by_kernel(logits, rows)
    logits = _scaled(logits, rows)
    normalizer = torch.logsumexp(logits, dim=-1)
    tokens = _picked(logits, normalizer, rows, (_most, _draw_of_cut, _draw_of_whole))
    return tokens, _log_probs(logits, normalizer, tokens)


def _by_kernel(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """By a kernel of Triton, but for rows whose distribution top-k or top-p cuts: their tokens by torch."""
    is_greedy, is_cut = _is_greedy(rows), _is_cut(rows)
    numbers = np.where(is_greedy | is_cut, sample_kernel.GREEDY, uniforms(rows["key"], rows["position"]))
    draws = torch.from_numpy(np.stack([numbers, _divisors(rows)], axis=1))
    tokens, log_probs, normalizer = sample_kernel.draw(logits, sent(draws, logits.device))
    if is_cut.any():
        at = sent(torch.from_numpy(np.flatnonzero(is_cut)), logits.device)
        cut, of_rows = _scaled(logits[at], rows[is_cut]), normalizer[at]
        drawn = _draw_of_cut(cut, of_rows, rows[is_cut])
        tokens[at], log_probs[at] = drawn, _log_probs(cut, of_rows, drawn)
    return tokens, log_probs


def _log_probs(logits: Tensor, normalizer: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens[:, None])[:, 0] - normalizer


def _most(logits: Tensor, normalizer: Tensor, rows: Rows) -> Tensor:
    return logits.argmax(-1)


def _draw_of_cut(logits: Tensor, normalizer: Tensor, rows: Rows) -> Tensor:
    return _invert(_truncated_probs(logits, normalizer, rows), rows)


def _draw_of_whole(logits: Tensor, normalizer: Tensor, rows: Rows) -> Tensor:
    return _invert(torch.exp(logits - normalizer[:, None]), rows)


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
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    threshold = (u * ends[:, -1])[:, None]
    block = torch.searchsorted(ends, threshold, right=True).clamp_(max=num_blocks - 1)  # [B, 1]
    inside = blocks.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    rest = threshold - (ends.gather(1, block) - inside[:, -1:])
    # Never behind the last token that has a probability, nor before the first one, however the sums were rounded.
    rest = torch.minimum(rest, inside[:, -1:] * (1 - 1e-12)).clamp_(min=0)
    offset = torch.searchsorted(inside, rest, right=True)
    return (block * BLOCK + offset)[:, 0].clamp_(max=vocab - 1)


def _truncated_probs(logits: Tensor, normalizer: Tensor, rows: Rows) -> Tensor:
    """Probabilities [B, V], with the tokens outside top-k and top-p at 0; not normalised again."""
    vocab = logits.shape[1]
    probs = torch.exp(logits - normalizer[:, None])
    top_k, top_p = rows["top_k"], rows["top_p"]
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=probs.device)[None]
    limit = sent(torch.from_numpy(np.where(top_k == 0, vocab, top_k)), probs.device)[:, None]
    ordered = torch.where(rank < limit, ordered, 0.0)
    # top-p is a share of what top-k left; the most likely token always stays.
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    share = sent(torch.from_numpy(top_p), probs.device)[:, None] * ordered.sum(-1, True, dtype=torch.float64)
    ordered = torch.where((before < share) | (rank == 0), ordered, 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ordered)
