"""The sums of tensors.py in host memory at the speed of memory, alone or in the pass that copies.

A function in C (digest.c), compiled once for a machine; where that fails, and for tensors of other devices, torch
computes the same sums. Last measured: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from strop.engines.checksum import tensors
from strop.engines.checksum.tensors import WORD_BYTES, finish
from strop.utils.c_library import WIDE_VECTORS, c_library

SOURCE = Path(__file__).with_name("digest.c")
_BLOCK_BYTES = 32 << 20
"""Runs that torch sums up are spread over so much memory at a time."""
FLAGS = ("-O3", "-march=native", *WIDE_VECTORS, "-fopenmp", "-fPIC")


class DigestKernel:
    """The compiled function."""

    def __init__(self, library: Path) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        functions = ctypes.CDLL(str(library))
        self._word_sum = functions.word_sum
        self._word_sum.argtypes = [pointer, pointer, number, number, pointer, pointer, ctypes.c_int]
        self._word_sum.restype = number
        self._word_sum_of_runs = functions.word_sum_of_runs
        self._word_sum_of_runs.argtypes = [pointer, number, number, number, number, pointer, pointer]
        self._word_sum_of_runs.restype = number

    def word_sum(self, source: Tensor, target: Tensor | None, *, first_word: int) -> int:
        """Sum of bytes [n] uint8, contiguous, that start at this word of their tensor; copied to `target` [n] before,
        where there is one."""
        rows, columns = tensors.multipliers(first_word + len(source) // WORD_BYTES + 1, source.device)
        total: int = self._word_sum(
            None if target is None else target.data_ptr(), source.data_ptr(), len(source), first_word,
            rows.data_ptr(), columns.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return total

    def word_sum_of_runs(self, runs: Tensor, *, first_word: int, stride_words: int) -> int:
        """Sum of runs [count, bytes] uint8, contiguous, that start so many words apart in their tensor."""
        count, words = runs.shape[0], runs.shape[1] // WORD_BYTES
        rows, columns = tensors.multipliers(first_word + count * stride_words + words, runs.device)
        total: int = self._word_sum_of_runs(
            runs.data_ptr(), count, words, first_word, stride_words, rows.data_ptr(), columns.data_ptr()
        )
        return total


@cache
def digest_kernel() -> DigestKernel | None:
    """None where nothing can be compiled."""
    library = c_library(SOURCE, flags=FLAGS, doing="the digest of weights")
    return None if library is None else DigestKernel(library)


def digest_tensor(tensor: Tensor) -> int:
    """As `tensors.digest_tensor`."""
    return finish(int(word_sum(tensor)), tensor.numel() * tensor.element_size())


def word_sum(tensor: Tensor, *, first_byte: int = 0) -> Tensor:
    """As `tensors.word_sum`."""
    content = _words(tensor, first_byte)
    if content is None:
        return tensors.word_sum(tensor, first_byte=first_byte)
    kernel = digest_kernel()
    assert kernel is not None, "there are words for it"
    return torch.tensor(kernel.word_sum(content, None, first_word=first_byte // WORD_BYTES))


def word_sum_of_runs(runs: Tensor, *, first_byte: int, stride: int) -> int:
    """Sum over the words of runs of a tensor, for parts that are cut by columns.

    Args:
        runs: [count, bytes] uint8, contiguous, of whole words; on any device.
        first_byte, stride: where the first run starts and how far apart they are, multiples of WORD_BYTES.
    """
    if _words(runs, first_byte) is not None and (kernel := digest_kernel()) is not None:
        return kernel.word_sum_of_runs(
            runs, first_word=first_byte // WORD_BYTES, stride_words=stride // WORD_BYTES
        )
    total, each = 0, max(1, _BLOCK_BYTES // stride)
    for start in range(0, len(runs), each):
        block = runs[start : start + each]
        spread = block.new_zeros((len(block), stride))  # a word of zeros adds nothing
        spread[:, : runs.shape[1]] = block
        total += int(tensors.word_sum(spread, first_byte=first_byte + start * stride))
    return total


def word_sum_of_share(content: Tensor, *, first_byte: int, rank: int, num_ranks: int) -> int:
    """Sum over the share of one rank in bytes that all have; the sums of all ranks add up to that of the bytes.

    Args:
        content: [n] uint8, a part of a tensor.
        first_byte: where it starts, a multiple of WORD_BYTES.
        rank, num_ranks: of those among which it is shared out.
    """
    each = -(-len(content) // (WORD_BYTES * num_ranks)) * WORD_BYTES
    share = content[rank * each : (rank + 1) * each]
    return int(word_sum(share, first_byte=first_byte + rank * each)) if len(share) else 0


@torch.no_grad()
def copied(source: Tensor, target: Tensor, *, first_byte: int = 0) -> Tensor:
    """Copy a tensor into another one of its shape; `word_sum` of what that one then holds, read while it is near.

    Args:
        source: a whole tensor, or a contiguous part of the row-major elements of one; on any device.
        target: of the same shape and dtype; it keeps its memory.
        first_byte: where the part starts, a multiple of WORD_BYTES.
    """
    there, content = _words(target, first_byte), None
    if there is not None and source.dtype == target.dtype:
        content = _words(source, first_byte)
    if there is None or content is None:
        target.copy_(source)
        return word_sum(target, first_byte=first_byte)
    kernel = digest_kernel()
    assert kernel is not None, "there are words for it"
    return torch.tensor(kernel.word_sum(content, there, first_word=first_byte // WORD_BYTES))


def _words(tensor: Tensor, first_byte: int) -> Tensor | None:
    """[n] uint8: a tensor's own bytes, for the compiled function; None where it is not for them."""
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and first_byte % WORD_BYTES == 0
    if not is_plain or tensor.data_ptr() % WORD_BYTES or digest_kernel() is None:
        return None
    return tensor.detach().view(-1).view(torch.uint8)
