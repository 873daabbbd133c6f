"""The digest of strop/engines/checksum/tensors.py, word by word in Python integers, from its definition."""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import Tensor

COLUMNS = 4096
MASK = (1 << 64) - 1


def slow_digest(tensor: Tensor) -> int:
    """Digest of a tensor of less than COLUMNS * COLUMNS words."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    padded = content + bytes(-len(content) % 8)
    total = 0
    for index in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * index : 8 * index + 8], "little")
        mixed = (word ^ (word >> 32)) * multiplier("column", index % COLUMNS) & MASK
        total += (mixed ^ (mixed >> 32)) * multiplier("row", index // COLUMNS)
    ending = (total & MASK).to_bytes(8, "little") + len(content).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(ending, digest_size=8).digest(), "little")


def multiplier(purpose: str, index: int) -> int:
    """Odd multiplier number `index`: eight bytes of an endless stream."""
    return int.from_bytes(_stream(purpose)[8 * index : 8 * index + 8], "little") | 1


@cache
def _stream(purpose: str) -> bytes:
    return hashlib.shake_256(f"strop digest {purpose}".encode()).digest(8 * COLUMNS)
