"""Parts of weights: which bytes of a whole tensor a rank holds, so that it can put them where they belong.

The bytes of a whole tensor count in row-major order. A part is a number of runs of them at equal distances: one run
where a tensor is cut by rows, one per row where it is cut by columns. Whoever has a place for a range of bytes asks
each rank to fill in its part of it; nobody gathers anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strop.engines.checksum import host
from strop.engines.checksum.tensors import WORD_BYTES

_BLOCK_BYTES = 4 << 20
"""Bytes that are cast, or copied from a device, at a time."""
_ALIGNMENT = 64
"""A whole tensor is shared out in multiples of so many elements."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Places of some bytes among others: runs of one length at equal distances."""

    first: int
    """Byte where the first run starts."""
    stride: int
    """Bytes from the start of a run to that of the next one."""
    count: int
    length: int
    """Bytes of a run."""

    def to_json(self) -> list[int]:
        """As plain JSON."""
        return [self.first, self.stride, self.count, self.length]

    @classmethod
    def from_json(cls, value: object) -> Runs:
        """The runs that `to_json` wrote; ValueError for another form."""
        match value:
            case [int(first), int(stride), int(count), int(length)] if min(
                first, count - 1, length - 1
            ) >= 0 and (count == 1 or stride >= length):
                return _runs(first, stride, count, length)
        raise ValueError(f"not runs of bytes: {str(value)[:200]}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs."""
        return self.count * self.length

    @property
    def stop(self) -> int:
        """Byte behind the last run."""
        return self.first + (self.count - 1) * self.stride + self.length

    def before(self, byte: int) -> int:
        """Number of their bytes that lie before this one."""
        if self.count <= 1:
            return min(max(0, byte - self.first), self.num_bytes)
        runs, rest = divmod(max(0, byte - self.first), self.stride)
        return min(runs * self.length + min(rest, self.length), self.num_bytes)

    def within(self, start: int, stop: int) -> list[Runs]:
        """Bytes of them that lie in [start, stop), counted from `start`: cut runs at the edges, whole ones between."""
        if start == 0 and self.stop <= stop:
            return [self]
        low, high = self.before(start), self.before(stop)
        pieces: list[Runs] = []
        while low < high:
            run, skipped = divmod(low, self.length)
            is_whole = skipped == 0 and high - low >= self.length
            count = (high - low) // self.length if is_whole else 1
            length = self.length if is_whole else min(self.length - skipped, high - low)
            first = self.first + run * self.stride + skipped - start
            pieces.append(
                Runs(first=first, stride=self.stride if count > 1 else 0, count=count, length=length)
            )
            low += count * length
        return pieces

    def put(self, content: Tensor, window: Tensor) -> None:
        """Copy bytes [num_bytes] uint8 to these places of a window [n] uint8."""
        place = window[self.first :].as_strided((self.count, self.length), (self.stride or self.length, 1))
        place.copy_(content.view(self.count, self.length))

    def is_between_words(self, num_bytes: int) -> bool:
        """Every run starts and ends between words of a tensor of so many bytes, or at its end."""
        ends = self.length % WORD_BYTES == 0 or (self.count == 1 and self.stop == num_bytes)
        return self.first % WORD_BYTES == 0 and ends and (self.count == 1 or self.stride % WORD_BYTES == 0)


@lru_cache(maxsize=1 << 16)
def _runs(first: int, stride: int, count: int, length: int) -> Runs:
    """Runs that were read before, from the sync before: there are thousands of them in each."""
    return Runs(first=first, stride=stride, count=count, length=length)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes of a tensor that one rank gives."""

    first: int
    """Byte of the whole tensor where the first run starts."""
    stride: int
    """Bytes from the start of a run to that of the next one."""
    runs: Tensor
    """[count, numbers]: the runs, contiguous, as this rank holds them; memory of the weight itself."""
    dtype: torch.dtype
    """In which they are given: what is asked for is cast, and nothing is kept of it."""

    @property
    def places(self) -> Runs:
        """Places of the runs in the whole tensor."""
        count, numbers = self.runs.shape
        return Runs(first=self.first, stride=self.stride, count=count, length=numbers * self.dtype.itemsize)

    @property
    def is_cast(self) -> bool:
        """It is held in another dtype."""
        return self.runs.dtype != self.dtype

    def cast(self) -> Part:
        """The same, held in the dtype in which it is given."""
        return replace(self, runs=self.runs.to(self.dtype))

    def given(self, start: int, stop: int) -> Tensor:
        """[n] uint8: bytes [start, stop) of this part, run by run; a view where nothing is cast."""
        size = self.dtype.itemsize
        low, high = start // size, -(-stop // size)
        data = self.runs.view(-1)[low:high].to(self.dtype).view(torch.uint8)
        return data[start - low * size : stop - low * size]

    def between(self, start: int, stop: int) -> Tensor:
        """[n] uint8: what lies in bytes [start, stop) of the whole tensor, run by run; as `given`."""
        places = self.places
        return self.given(places.before(start), places.before(stop))

    def blocks(self, unit: int) -> Iterator[tuple[int, Tensor]]:
        """All of it in pieces [n] uint8 of whole units of so many bytes, each behind its first byte: one, or, where it
        is cast or on a device, some that are small."""
        is_in_one_piece = not self.is_cast and self.runs.device.type == "cpu"
        num_bytes = self.places.num_bytes
        each = num_bytes if is_in_one_piece else max(1, _BLOCK_BYTES // unit) * unit
        for start in range(0, num_bytes, each):
            yield start, self.given(start, min(start + each, num_bytes))

    def word_sum(self, num_bytes: int) -> int:
        """The word sum (strop.engines.checksum) of this part of a tensor of so many bytes, modulo 2^64. Where its runs
        do not lie between words, of its own bytes alone, which adds up to nothing."""
        places, total = self.places, 0
        is_part = places.is_between_words(num_bytes)
        if is_part and places.count > 1:
            for start, content in self.blocks(places.length):
                first = places.first + start // places.length * places.stride
                runs = content.view(-1, places.length)
                total += host.word_sum_of_runs(runs, first_byte=first, stride=places.stride)
        else:
            for start, content in self.blocks(WORD_BYTES):
                total += int(host.word_sum(content, first_byte=start + (places.first if is_part else 0)))
        return (total + (1 << 63)) % (1 << 64) - (1 << 63)

    def fill(self, window: Tensor, start: int) -> int | None:
        """Put what lies in bytes [start, start + n) of the whole tensor into `window` [n] uint8.

        Returns:
            The word sum of what was put, where it is one run that starts at a word; else None.
        """
        if self.runs.shape[0] == 1:
            return self._fill_one(window, start, start + len(window))
        content = self.between(start, start + len(window))
        for places in self.places.within(start, start + len(window)):
            places.put(content[: places.num_bytes], window)
            content = content[places.num_bytes :]
        return None

    def _fill_one(self, window: Tensor, start: int, stop: int) -> int | None:
        places = self.places
        begin, end = max(places.first, start), min(places.stop, stop)
        if begin >= end:
            return 0
        source = self.given(begin - places.first, end - places.first)
        target = window[begin - start : end - start]
        if begin % WORD_BYTES or source.device.type != "cpu":
            target.copy_(source)
            return None
        return int(host.copied(source, target, first_byte=begin))


def part_of(tensor: Tensor, dtype: torch.dtype, *, rank: int, num_ranks: int) -> Part | None:
    """Part that this rank gives of a weight, which all ranks hold whole or in shards; None where it gives nothing.

    Of what several ranks hold, one gives it; a whole tensor is shared out evenly.

    Args:
        tensor: as this rank has it.
        dtype: in which it is given.
        rank, num_ranks: of all that hold the model.

    Raises:
        ValueError: a shard is no such part, or a sum over ranks that was not taken yet.
    """
    if not isinstance(tensor, DTensor):
        flat = tensor.detach().contiguous().view(-1)
        each = math.ceil(len(flat) / num_ranks / _ALIGNMENT) * _ALIGNMENT
        own = flat[rank * each : (rank + 1) * each]
        return (
            Part(first=rank * each * dtype.itemsize, stride=0, runs=own[None], dtype=dtype)
            if len(own)
            else None
        )
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
    values = tensor.to_local().detach()
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
    return Part(first=first, stride=stride, runs=values.contiguous().view(count, -1), dtype=dtype)
