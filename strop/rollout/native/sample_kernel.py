"""Triton kernel of sampling: the sums of probabilities by which a token is found, in one reading of the logits.

In torch's operations a draw is some ten passes over [B, V], which take as long as a layer or two of a decode step;
where Triton or the device is missing, sampling.py computes the same by them. Not measured on a card yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.utils.triton import jit, tl, triton


def block_masses(logits: Tensor, normalizers: Tensor, block: int) -> Tensor:
    """sum_v exp(z_v - normalizer) [B, blocks] over each block of a row of logits z [B, V], all float32."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, block)
    masses = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    if rows:
        _block_masses[(rows, blocks)](
            logits, logits.stride(0), vocab, normalizers, masses, blocks, BLOCK=block, num_warps=4
        )
    return masses


@jit
def _block_masses(logits, stride, vocab, normalizers, masses, blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    z = tl.load(logits + row * stride + columns, mask=inside, other=0.0)
    probs = tl.where(inside, tl.exp(z - tl.load(normalizers + row)), 0.0)
    tl.store(masses + row * blocks + block, tl.sum(probs, 0))
