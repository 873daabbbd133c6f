"""Parts of weights: which bytes of a whole tensor a rank holds, so that it can put them where they belong.

The bytes of a whole tensor count in row-major order. A part is a number of runs of them at equal distances: one run
where a tensor is cut by rows, one per row where it is cut by columns. Whoever has a place for a range of bytes asks
each rank to fill in its part of it; nobody gathers anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strop.engines.checksum.host import copied
from strop.engines.checksum.tensors import WORD_BYTES

_ALIGNMENT = 64
"""A whole tensor is shared out in multiples of so many elements."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes of a tensor that one rank gives."""

    first: int
    """Byte of the whole tensor where the first run starts."""
    stride: int
    """Bytes from the start of a run to that of the next one."""
    runs: Tensor
    """[count, bytes] uint8: the runs; memory of the weight itself where nothing is cast."""

    def fill(self, window: Tensor, start: int) -> int | None:
        """Put what lies in bytes [start, start + n) of the whole tensor into `window` [n] uint8.

        Returns:
            The word sum (strop.engines.checksum) of what was put, where it is one run between whole words; else None.
        """
        count, length = self.runs.shape
        stop = start + len(window)
        if count == 1:
            return self._fill_one(window, start, stop)
        # Runs [low, high) lie inside; those before and after are cut by the edges of the window.
        low = max(0, -(-(start - self.first) // self.stride))
        high = min(count, max(low, (stop - self.first - length) // self.stride + 1))
        for run in {low - 1, high} & set(range(count)):
            at = self.first + run * self.stride
            begin, end = max(at, start), min(at + length, stop)
            if begin < end:
                window[begin - start : end - start].copy_(self.runs[run, begin - at : end - at])
        if high > low:
            place = window[self.first + low * self.stride - start :]
            place.as_strided((high - low, length), (self.stride, 1)).copy_(self.runs[low:high])
        return None

    def _fill_one(self, window: Tensor, start: int, stop: int) -> int | None:
        length = self.runs.shape[1]
        begin, end = max(self.first, start), min(self.first + length, stop)
        if begin >= end:
            return 0
        source = self.runs[0, begin - self.first : end - self.first]
        target = window[begin - start : end - start]
        if begin % WORD_BYTES or source.device.type != "cpu":
            target.copy_(source)
            return None
        return int(copied(source, target, first_byte=begin))


def adds_up(tensor: Tensor, dtype: torch.dtype) -> bool:
    """The sums that `Part.fill` gives on all ranks add up to that of the tensor: every part starts and ends between
    words. All ranks come to the same answer."""
    if tensor.device.type != "cpu":
        return False
    if not isinstance(tensor, DTensor):
        return True
    is_by_rows = all(p.is_replicate() or (isinstance(p, Shard) and p.dim == 0) for p in tensor.placements)
    return is_by_rows and tensor.shape[1:].numel() * dtype.itemsize % WORD_BYTES == 0


def part_of(tensor: Tensor, dtype: torch.dtype, *, rank: int, num_ranks: int) -> Part | None:
    """Part that this rank gives of a weight, which all ranks hold whole or in shards; None where it gives nothing.

    Of what several ranks hold, one gives it; a whole tensor is shared out evenly.

    Args:
        tensor: as this rank has it.
        dtype: in which it is given; this rank's part alone is cast.
        rank, num_ranks: of all that hold the model.

    Raises:
        ValueError: a shard is no such part, or a sum over ranks that was not taken yet.
    """
    if not isinstance(tensor, DTensor):
        flat = tensor.detach().contiguous().view(-1)
        each = math.ceil(len(flat) / num_ranks / _ALIGNMENT) * _ALIGNMENT
        own = flat[rank * each : (rank + 1) * each].to(dtype)
        return _part(rank * each * dtype.itemsize, 0, own[None]) if len(own) else None
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(
        placement.is_replicate() and at for placement, at in zip(placements, coordinate, strict=True)
    ):
        return None
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a weight of shape {list(tensor.shape)} is a sum over ranks that was not taken yet")
    whole = tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    values = tensor.to_local().detach().to(dtype)
    if tuple(values.shape) != tuple(shape):
        raise ValueError(
            f"a shard of {list(whole)} is {list(values.shape)}, but {list(shape)} were dealt out"
        )
    if values.numel() == 0:
        return None
    last = max((dim for dim in range(len(whole)) if shape[dim] != whole[dim]), default=0)
    if any(shape[dim] != whole[dim] for dim in range(1, last)):
        raise ValueError(
            f"a shard of {list(whole)} is cut along its dimensions {list(shape)}, which is no row of runs"
        )
    inner = math.prod(whole[last + 1 :]) * dtype.itemsize
    stride = whole[last] * inner if whole else inner
    runs_before = offset[0] * math.prod(whole[1:last]) if last else 0
    first = runs_before * stride + (offset[last] * inner if whole else 0)
    count = math.prod(shape[:last])
    return _part(first, stride, values.contiguous().view(count, -1))


def _part(first: int, stride: int, values: Tensor) -> Part:
    return Part(first=first, stride=stride, runs=values.contiguous().view(len(values), -1).view(torch.uint8))
