"""Changes of a weight since the last sync: positions and new values of the elements that differ, bit for bit.

A step at a small learning rate moves few values of half precision to the next number that they can hold. Of a bucket
the changes of one weight are

    values   [n] of the weight's own size, in row-major order
    gaps     [n] uint16, from an even byte on: positions less the position before; the first less 0

Where a gap has more than 16 bits, unchanged elements come between. With two bytes an element and 1 % of them changed
that is 2 % of the weight's bytes; the position costs less than a bitmap as long as under 6 % of the elements change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.engines.weights import TensorMetadata
from strop.rollout.weight_sync.comparison import differing
from strop.rollout.weight_sync.stream import ALIGNMENT, Bucket, tensor_at
from strop.utils.machine_limits import host_free_bytes

logger = logging.getLogger(__name__)

_GAP_BYTES = 2
_MAX_GAP = (1 << 16) - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes: bits are compared and written, so that NaN and -0.0 are values like others."""


@dataclass(frozen=True)
class Changes:
    """Elements of a weight that differ from the last sync."""

    positions: Tensor
    """[n] int64, ascending, among the elements in row-major order."""
    values: Tensor
    """[n] integers of the weight's size: the bits of the new values."""

    def apply(self, weight: Tensor) -> None:
        """Write them into a weight in place."""
        whole = weight.detach().contiguous()
        bits = bits_of(whole)
        bits.scatter_(0, self.positions.to(bits.device), self.values.to(bits.device))
        if not weight.is_contiguous():
            weight.detach().copy_(whole)


def bits_of(tensor: Tensor) -> Tensor:
    """[numel] integers: the bits of a tensor's elements in row-major order; a view where it is contiguous.

    Raises:
        ValueError: elements of more than 8 bytes.
    """
    kind = _INTEGERS.get(tensor.element_size())
    if kind is None:
        raise ValueError(f"changes of {tensor.dtype} are not supported: its elements have more than 8 bytes")
    return tensor.detach().contiguous().view(-1).view(kind)


def changes_num_bytes(weight: TensorMetadata, count: int) -> int:
    """Bytes of so many changes of a weight in a bucket."""
    return _gaps_start(weight, count) + _GAP_BYTES * count


def changes_between(old: Tensor, new: Tensor, weight: TensorMetadata) -> Changes | None:
    """Changes of a weight, from and to these bits [numel] in host memory; None where they have as many bytes as the
    weight."""
    limit = (weight.num_bytes - 1) // (_GAP_BYTES + weight.dtype.itemsize)
    positions = differing(old.numpy(), new.numpy(), limit)
    if positions is None:
        return None
    written = _with_stops(torch.from_numpy(positions))
    if changes_num_bytes(weight, len(written)) >= weight.num_bytes:
        return None
    return Changes(written, new.index_select(0, written))


def write_changes(changes: Changes, weight: TensorMetadata, data: Tensor, offset: int) -> None:
    """Write changes of a weight into a bucket [num_bytes] uint8 from `offset` on, a multiple of ALIGNMENT."""
    count, start = len(changes.positions), offset + _gaps_start(weight, len(changes.positions))
    data[offset : offset + count * weight.dtype.itemsize].copy_(changes.values.view(torch.uint8))
    gaps = changes.positions.diff(prepend=changes.positions.new_zeros(1))
    low = torch.stack([gaps & 0xFF, gaps >> 8], dim=1).to(torch.uint8)
    data[start : start + _GAP_BYTES * count].copy_(low.view(-1))


def read_changes(data: Tensor, weight: TensorMetadata, offset: int, count: int) -> Changes:
    """Changes of a weight as `write_changes` wrote them; the values are a view of `data`.

    Raises:
        ValueError: they do not lie within the bucket, or name elements that the weight does not have.
    """
    kind = _INTEGERS.get(weight.dtype.itemsize)
    is_odd = offset < 0 or bool(offset % weight.dtype.itemsize)
    if kind is None or is_odd or count < 0 or offset + changes_num_bytes(weight, count) > len(data):
        raise ValueError(f"{count} changes of {weight.dtype} from byte {offset} on, in {len(data)} bytes")
    values = data[offset : offset + count * weight.dtype.itemsize].view(kind)
    start = offset + _gaps_start(weight, count)
    gaps = data[start : start + _GAP_BYTES * count].view(torch.int16).to(torch.int64) & _MAX_GAP
    positions = gaps.cumsum(0)
    if count and (bool((gaps[1:] == 0).any()) or int(positions[-1]) >= torch.Size(weight.shape).numel()):
        raise ValueError(
            f"changes of elements up to {int(positions[-1])} of {list(weight.shape)}, or one twice"
        )
    return Changes(positions, values)


class SentWeights:
    """Bits of the weights of the last sync, in host memory, of which the next one sends the changes.

    Weights of more than two bytes an element, which hold every step of an optimizer, are forgotten once most of their
    elements changed: they will again. Those that are kept never take more host memory than stays free; the others
    always travel whole.
    """

    def __init__(self, *, free_bytes: Callable[[], int] = host_free_bytes) -> None:
        """Nothing is kept yet.

        Args:
            free_bytes: gives the free host memory.
        """
        self._free_bytes = free_bytes
        self._bits: dict[str, Tensor] = {}
        self._left_out: set[str] = set()
        """Names of weights that are not kept."""
        self._is_full = False
        self.num_bytes = 0
        """Host memory of those that are."""

    def reduced(self, bucket: Bucket, *, is_known: bool) -> Bucket:
        """A bucket of whole weights with the changes of those that have fewer bytes so; remembers all of them.

        Args:
            bucket: as the weights are now.
            is_known: every receiver holds the weights that were remembered last.
        """
        changes: dict[str, Changes] = {}
        for weight, tensor in bucket.tensors():
            found = self._remember(weight, tensor, is_known=is_known)
            if found is not None:
                changes[weight.name] = found
        return _packed(bucket, changes) if changes else bucket

    @torch.no_grad()
    def _remember(self, weight: TensorMetadata, tensor: Tensor, *, is_known: bool) -> Changes | None:
        if weight.name in self._left_out or weight.dtype.itemsize not in _INTEGERS:
            return None
        new, old = bits_of(tensor).cpu(), self._bits.get(weight.name)
        if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
            self._keep(weight.name, new)
            return None
        changes = changes_between(old, new, weight) if is_known else None
        if changes is not None:
            old.scatter_(0, changes.positions, changes.values)
        elif is_known and weight.dtype.itemsize > 2:
            self._left_out.add(weight.name)
            self._forget(weight.name)
        else:
            old.copy_(new)
        return changes

    def _keep(self, name: str, bits: Tensor) -> None:
        """Keep a weight, unless that would take more memory than is left then."""
        self._forget(name)
        if self.num_bytes + bits.nbytes <= self._free_bytes() - bits.nbytes:
            self._bits[name] = bits.clone()
            self.num_bytes += bits.nbytes
            return
        self._left_out.add(name)
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "host memory has room for %.1f GB of the weights of the last sync; of the others no changes are sent, "
                "they travel whole",
                self.num_bytes / 1e9,
            )

    def _forget(self, name: str) -> None:
        forgotten = self._bits.pop(name, None)
        self.num_bytes -= 0 if forgotten is None else forgotten.nbytes


def _packed(bucket: Bucket, changes: Mapping[str, Changes]) -> Bucket:
    """The bucket with these changes in place of the weights that they are of."""
    entries, end = [], 0
    counts = {name: len(found.positions) for name, found in changes.items()}
    for weight, _ in bucket.entries:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        entries.append((weight, start))
        count = counts.get(weight.name)
        end = start + (weight.num_bytes if count is None else changes_num_bytes(weight, count))
    data = torch.empty(end, dtype=torch.uint8, device=bucket.data.device)
    for (weight, start), (_, tensor) in zip(entries, bucket.tensors(), strict=True):
        if weight.name in changes:
            write_changes(changes[weight.name], weight, data, start)
        else:
            tensor_at(data, weight, start).copy_(tensor)
    return Bucket(entries=tuple(entries), data=data, counts=counts)


def _gaps_start(weight: TensorMetadata, count: int) -> int:
    """First byte of the gaps behind so many values."""
    return -(-count * weight.dtype.itemsize // _GAP_BYTES) * _GAP_BYTES


def _with_stops(positions: Tensor) -> Tensor:
    """Positions [n] with others between them where the gap to the one before is above `_MAX_GAP`."""
    gaps = positions.diff(prepend=positions.new_zeros(1))
    if len(gaps) == 0 or int(gaps.max()) <= _MAX_GAP:
        return positions
    stops = (gaps - 1).clamp(min=0) // _MAX_GAP  # [n], before each
    repeats = stops + 1
    last = repeats.cumsum(0) - 1  # [n], index of each position in the result
    steps = (last.repeat_interleave(repeats) - torch.arange(int(last[-1]) + 1)) * _MAX_GAP
    return positions.repeat_interleave(repeats) - steps
