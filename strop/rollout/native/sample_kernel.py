"""Triton kernels of sampling: the token of each row and its log-prob in one reading of the logits, by two launches.

In torch's operations a draw is some ten passes over [B, V], which take as long as a layer or two of a decode step, and
thirty launches beside them; where Triton or the device is missing, sampling.py computes the same by them. A row is
computed by programs of its own, in one order of sums whatever runs beside it. Not measured on a card yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.utils.triton import jit, tl, triton

BLOCK = 1024
"""Logits that a program reads, and whose probabilities are added up apart."""
GREEDY = -1.0
"""In place of a uniform number: the most likely token."""


def draw(logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B] int64, their log-probs [B] and logsumexp_v z_v / t [B] of logits z [B, V] float32.

    A token is the first one at which the cumulative sum of probabilities is above a number's share of all of them.

    Args:
        logits: [B, V], consecutive in each row.
        draws: [B, 2] float64, of each row its number in (0, 1), or GREEDY, and its temperature t.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    # Not two rows of one tensor: the second would begin at an aligned address for some numbers of rows alone, and
    # Triton makes another kernel for others.
    tops, sums = (torch.empty(rows, blocks, dtype=torch.float32, device=logits.device) for _ in range(2))
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs, normalizers = (torch.empty_like(tokens, dtype=torch.float32) for _ in range(2))
    if rows:
        _block_sums[(rows, blocks)](
            logits, logits.stride(0), vocab, draws, tops, sums, blocks, BLOCK=BLOCK, num_warps=4
        )
        _draw[(rows,)](
            logits, logits.stride(0), vocab, draws, tops, sums, blocks, tokens, log_probs, normalizers,
            BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(blocks), num_warps=4,
        )  # fmt: skip
    return tokens, log_probs, normalizers


@jit
def _block_sums(logits, stride, vocab, draws, tops, sums, blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    temperature = tl.load(draws + row * 2 + 1).to(tl.float32)
    z = tl.div_rn(tl.load(logits + row * stride + columns, mask=inside, other=-1e38), temperature)
    top = tl.maximum(tl.max(z, 0), -1e38)
    tl.store(tops + row * blocks + block, top)
    tl.store(sums + row * blocks + block, tl.sum(tl.where(inside, tl.exp(z - top), 0.0), 0))


@jit
def _draw(
    logits, stride, vocab, draws, tops, sums, blocks, tokens, log_probs, normalizers,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    number, temperature = tl.load(draws + row * 2), tl.load(draws + row * 2 + 1).to(tl.float32)
    at = tl.arange(0, BLOCKS)
    block_tops = tl.load(tops + row * blocks + at, mask=at < blocks, other=-1e38)
    top = tl.max(block_tops, 0)
    masses = tl.load(sums + row * blocks + at, mask=at < blocks, other=0.0) * tl.exp(block_tops - top)
    normalizer = top + tl.log(tl.sum(masses, 0))
    ends = tl.cumsum(masses.to(tl.float64), 0)
    threshold = number * tl.max(ends, 0)
    # Only what has a probability, however the sums were rounded, which are scans in parallel; where rounding leaves
    # none, the most likely one.
    drawn = tl.min(tl.where((ends > threshold) & (masses > 0), at, BLOCKS), 0)
    likeliest = tl.min(tl.where(block_tops == top, at, BLOCKS - 1), 0)
    block = tl.where((number < 0) | (drawn == BLOCKS), likeliest, drawn)
    end = tl.sum(tl.where(at == block, ends, 0.0), 0)

    offsets = tl.arange(0, BLOCK)
    columns = block * BLOCK + offsets
    inside = columns < vocab
    z = tl.div_rn(tl.load(logits + row * stride + columns, mask=inside, other=-1e38), temperature)
    probs = tl.where(inside, tl.exp(z - top), 0.0)
    within = tl.cumsum(probs.to(tl.float64), 0)
    rest = threshold - (end - tl.max(within, 0))
    passed = tl.min(tl.where((within > rest) & (probs > 0), offsets, BLOCK), 0)
    best = tl.min(tl.where(z == tl.max(z, 0), offsets, BLOCK - 1), 0)
    offset = tl.where((number < 0) | (passed == BLOCK), best, passed)
    tl.store(tokens + row, tl.minimum(block * BLOCK + offset, vocab - 1).to(tl.int64))
    tl.store(log_probs + row, tl.sum(tl.where(offsets == offset, z, 0.0), 0) - normalizer)
    tl.store(normalizers + row, normalizer)
