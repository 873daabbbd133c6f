"""A fast 64-bit digest of tensors, the same on every device and for every way of holding the bits.

The digest of a tensor is a sum over its 64-bit words, so the shards of a tensor contribute their own words and the
sums add up: the digest of a sharded model costs one pass over the local shards and one small reduction, and nothing
is gathered. models.py combines the digests of all parameters into one of the model.

    digest = H(number of bytes, sum over words i of  odd_row[i / 4096] * mix(word[i], odd_column[i % 4096])  mod 2^64)
    mix(x, k) = y ^ (y >>> 32)  with  y = k * (x ^ (x >>> 32))  mod 2^64

Collisions. Every step is a bijection of a word and the multipliers are odd, so a change inside one word changes the
sum for certain. For changes in several words, also of sign bits alone, the multipliers (drawn from SHAKE-256, one for
each column and each row of words) and the folded high bits make each difference behave like a random 64-bit number, so
that they cancel with a probability of about 2^-64; swapped or shifted words meet other multipliers. That is for
faults, which do not know the multipliers. It is no protection against somebody who builds a collision on purpose: for
that there is SHA-256.

This is the definition, in torch, for every device; it reads device memory where it lies. On one core of a shared
machine (AVX2): 2.9 GB/s, where SHA-256 with the processor's own instructions had 1.6. host.py computes the same sums
of host memory about as fast as a copy. Not yet run on a GPU.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

WORD_BYTES = 8
"""Digests are sums over words of this size; a part that is added to others starts at a multiple of it."""
_COLUMNS = 4096
"""Words of one row: each column has a multiplier, and each row."""
_BLOCK_ROWS_CPU = 64
"""Rows computed at a time: 2 MiB, so that the passes of one block meet in the cache."""
_BLOCK_ROWS_DEVICE = 1024
"""The same for accelerators, where a block must be large enough to hide the launch of a kernel: 32 MiB."""
_LOW_HALF = 0xFFFFFFFF


def digest_tensor(tensor: Tensor) -> int:
    """64-bit digest of a tensor's bits in row-major order; shape and dtype do not enter.

    Args:
        tensor: any shape, dtype and strides, on any device; a plain tensor, not a shard.

    Returns:
        A number in [0, 2^64), independent of the device and of where the tensor lies.
    """
    return finish(int(word_sum(tensor)), tensor.numel() * tensor.element_size())


def finish(total: int, num_bytes: int) -> int:
    """The digest of a tensor of `num_bytes` whose words sum up to `total`, modulo 2^64."""
    content = (total % (1 << 64)).to_bytes(8, "little") + num_bytes.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


@torch.no_grad()
def word_sum(tensor: Tensor, *, first_byte: int = 0) -> Tensor:
    """Scalar int64 on the tensor's device: the sum over words that `finish` takes.

    The sums of consecutive parts of a tensor add up (modulo 2^64) to that of the whole.

    Args:
        tensor: a whole tensor, or a contiguous part of the row-major elements of one.
        first_byte: where the part starts, a multiple of WORD_BYTES; all parts but the last end at such a place.

    Raises:
        ValueError: the part does not start at a word.
    """
    if first_byte % WORD_BYTES:
        raise ValueError(f"a part starts at byte {first_byte}, but parts start at multiples of {WORD_BYTES}")
    content = _bytes(tensor)
    end = len(content) // WORD_BYTES * WORD_BYTES
    first = first_byte // WORD_BYTES
    total = _sum_of_words(content[:end].view(torch.int64), first)
    if end < len(content):  # the last word is filled up with zeros
        last = torch.nn.functional.pad(content[end:], (0, end + WORD_BYTES - len(content)))
        total += _sum_of_words(last.view(torch.int64), first + end // WORD_BYTES)
    return total


def multipliers(num_words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd multipliers of the rows that so many words fill or begin, at least, and of the columns of each; int64."""
    return _keys("row", num_words // _COLUMNS + 2, device), _keys("column", _COLUMNS, device)


def _bytes(tensor: Tensor) -> Tensor:
    """[num_bytes] uint8: the bits of a tensor in row-major order, starting at a whole word of memory."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.uint8)


def _sum_of_words(words: Tensor, first: int) -> Tensor:
    """Scalar int64: the sum of words [n], the first of which is number `first` of its tensor."""
    row, column = divmod(first, _COLUMNS)
    row_keys, column_keys = multipliers(first + len(words), words.device)
    scratch = _Scratch(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    start = min(-column % _COLUMNS, len(words))
    if start:  # up to the end of the row
        total += scratch.mixed(words[None, :start], column_keys[column : column + start])[0] * row_keys[row]
        row += 1
    end = start + (len(words) - start) // _COLUMNS * _COLUMNS
    for block in torch.split(words[start:end].view(-1, _COLUMNS), scratch.rows):
        total += (scratch.mixed(block, column_keys) * row_keys[row : row + len(block)]).sum()
        row += len(block)
    if end < len(words):
        total += scratch.mixed(words[None, end:], column_keys[: len(words) - end])[0] * row_keys[row]
    return total


class _Scratch:
    """Two buffers that the passes over one tensor share."""

    def __init__(self, device: torch.device) -> None:
        self.rows = _BLOCK_ROWS_CPU if device.type == "cpu" else _BLOCK_ROWS_DEVICE
        self._device = device
        self._buffers: tuple[Tensor, Tensor] | None = None

    def mixed(self, words: Tensor, keys: Tensor) -> Tensor:
        """[rows] sums of mix(word, key) over words [rows, columns] and keys [columns]."""
        shape = words.shape
        if self._buffers is None or self._buffers[0].shape[0] < shape[0]:
            buffers = torch.empty((2, shape[0], _COLUMNS), dtype=torch.int64, device=self._device)
            self._buffers = (buffers[0], buffers[1])
        value, high = (buffer[: shape[0], : shape[1]] for buffer in self._buffers)
        # The shift of signed words copies the sign; the mask makes it the unsigned one.
        torch.bitwise_right_shift(words, 32, out=value)
        value.bitwise_and_(_LOW_HALF).bitwise_xor_(words).mul_(keys)
        torch.bitwise_right_shift(value, 32, out=high)
        value.bitwise_xor_(high.bitwise_and_(_LOW_HALF))
        return value.sum(dim=1)


def _keys(purpose: str, count: int, device: torch.device) -> Tensor:
    """At least `count` odd pseudo-random multipliers [>= count] int64, always the same ones."""
    return _table(purpose, 1 << max(12, (count - 1).bit_length()), device)


@lru_cache(maxsize=16)
def _table(purpose: str, count: int, device: torch.device) -> Tensor:
    drawn = hashlib.shake_256(f"strop digest {purpose}".encode()).digest(8 * count)
    return torch.from_numpy(np.frombuffer(drawn, dtype="<i8") | 1).to(device)
