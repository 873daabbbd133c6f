"""Changes of weights since the last sync: positions and new values of the elements that differ, bit for bit.

A step at a small learning rate moves few values of half precision to the next number that they can hold. Each rank of
the sender compares its own part of a weight with what it sent last. Of a bucket its changes are

    values   [n] of the weight's own size, in the order of the part's bytes
    gaps     [n] uint16, from an even byte on: positions less the position before; the first less 0

Positions count the elements of the part. Where a gap has more than 16 bits, unchanged elements come between. With two
bytes an element and 1 % of them changed that is 2 % of the weight's bytes; the position costs less than a bitmap as
long as under 6 % of the elements change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.engines.weight_parts import Part, Runs
from strop.engines.weights import TensorMetadata
from strop.rollout.weight_sync.comparison import differing
from strop.utils.machine_limits import host_free_bytes

logger = logging.getLogger(__name__)

_GAP_BYTES = 2
_MAX_GAP = (1 << 16) - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes: bits are compared and written, so that NaN and -0.0 are values like others."""


@dataclass(frozen=True)
class Changes:
    """Elements of a weight, or of a part of one, that differ from the last sync."""

    positions: Tensor
    """[n] int64 among the elements in row-major order; of a part in the order of its bytes."""
    values: Tensor
    """[n] integers of the weight's size: the bits of the new values."""

    @property
    def num_bytes(self) -> int:
        """Bytes of them in a bucket."""
        return changes_num_bytes(self.values.element_size(), len(self.positions))

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


@dataclass(frozen=True, kw_only=True)
class ChangedPart:
    """Place in a bucket of the changes of one rank's part of a weight."""

    offset: int
    """Byte of the bucket where they start."""
    count: int
    """Elements, with those that come between large gaps."""
    places: Runs
    """The part in the weight."""

    def to_json(self) -> list[int]:
        """As plain JSON."""
        return [self.offset, self.count, *self.places.to_json()]

    @classmethod
    def from_json(cls, value: object) -> ChangedPart:
        """The part that `to_json` wrote; ValueError for another form."""
        match value:
            case [int(offset), int(count), *runs]:
                return cls(offset=offset, count=count, places=Runs.from_json(runs))
        raise ValueError(f"not the place of changes: {str(value)[:200]}")


def changes_num_bytes(itemsize: int, count: int) -> int:
    """Bytes in a bucket of so many changes of elements of this size."""
    return _gaps_start(itemsize, count) + _GAP_BYTES * count


def changes_between(old: Tensor, new: Iterable[tuple[int, Tensor]]) -> Changes | None:
    """Changes from these bits [numel] in host memory to new ones, which they hold afterwards; None, and some of the new
    ones, where the changes have as many bytes as all elements.

    Args:
        old: is overwritten.
        new: the new bits in pieces, each behind the number of its first element.
    """
    itemsize = old.element_size()
    limit = (old.nbytes - 1) // (_GAP_BYTES + itemsize)
    found: list[Tensor] = []
    for start, piece in new:
        held = old[start : start + len(piece)]
        positions = differing(held.numpy(), piece.numpy(), limit)
        if positions is None:
            return None
        limit -= len(positions)
        changed = torch.from_numpy(positions)
        held.scatter_(0, changed, piece.index_select(0, changed))
        found.append(changed + start)
    written = _with_stops(torch.cat(found)) if found else torch.empty(0, dtype=torch.int64)
    if changes_num_bytes(itemsize, len(written)) >= old.nbytes:
        return None
    return Changes(written, old.index_select(0, written))


def write_changes(changes: Changes) -> Tensor:
    """[num_bytes] uint8: changes as they travel."""
    values = changes.values.view(torch.uint8)
    start = _gaps_start(changes.values.element_size(), len(changes.values))
    data = torch.zeros(changes.num_bytes, dtype=torch.uint8)
    data[: len(values)] = values
    gaps = changes.positions.diff(prepend=changes.positions.new_zeros(1)).numpy().astype("<u2")
    data[start : start + gaps.nbytes] = torch.from_numpy(gaps.view("u1"))
    return data


def read_changes(data: Tensor, weight: TensorMetadata, part: ChangedPart) -> Changes:
    """Changes of a part of a weight that lie in a bucket [n] uint8, as elements of the whole weight; the values are a
    view of `data`.

    Raises:
        ValueError: they do not lie within the bucket, or name elements that the part does not have.
    """
    itemsize, count, offset = weight.dtype.itemsize, part.count, part.offset
    kind, places = _INTEGERS.get(itemsize), part.places
    num_elements = places.num_bytes // itemsize
    is_odd = offset < 0 or bool(offset % itemsize)
    if kind is None or is_odd or count < 0 or offset + changes_num_bytes(itemsize, count) > len(data):
        raise ValueError(f"{count} changes of {weight.dtype} from byte {offset} on, in {len(data)} bytes")
    if any(number % itemsize for number in (places.first, places.stride, places.length)) or (
        places.stop > weight.num_bytes
    ):
        raise ValueError(f"a part at {places} of {list(weight.shape)} {weight.dtype}")
    values = data[offset : offset + count * itemsize].view(kind)
    start = offset + _gaps_start(itemsize, count)
    # In place: there may be millions of them.
    positions = data[start : start + _GAP_BYTES * count].view(torch.int16).to(torch.int64)
    positions.bitwise_and_(_MAX_GAP)
    is_twice = bool((positions[1:] == 0).any())
    positions.cumsum_(0)
    if count and (is_twice or int(positions[-1]) >= num_elements):
        raise ValueError(f"changes of elements up to {int(positions[-1])} of {num_elements}, or one twice")
    if places.count > 1:
        run = positions // (places.length // itemsize)
        positions.add_(run, alpha=(places.stride - places.length) // itemsize)
    return Changes(positions.add_(places.first // itemsize), values)


def joined_changes(data: Tensor, weight: TensorMetadata, parts: Sequence[ChangedPart]) -> Changes:
    """Changes of a weight from those of all its parts; raises as `read_changes`, and where there are none."""
    if not parts:
        raise ValueError("no part of it has changed")
    changes = [read_changes(data, weight, part) for part in parts]
    if len(changes) == 1:
        return changes[0]
    return Changes(
        torch.cat([changed.positions for changed in changes]),
        torch.cat([changed.values for changed in changes]),
    )


@dataclass
class _SentPart:
    """A rank's part of a weight as it was sent last."""

    dtype: torch.dtype
    places: Runs
    word_sum: int
    bits: Tensor | None = None


class SentParts:
    """A rank's parts of the weights of the last sync, of which the next one sends the changes: their bits in host
    memory, or at least their sums, which show whether they have changed at all.

    Bits of weights of more than two bytes an element, which hold every step of an optimizer, are forgotten once most of
    their elements changed: they will again. Those that all ranks keep never take more host memory than stays free; the
    others always travel whole.
    """

    def __init__(self, *, free_bytes: Callable[[], int] = host_free_bytes) -> None:
        """Nothing is kept yet.

        Args:
            free_bytes: gives the free host memory.
        """
        self._free_bytes = free_bytes
        self.num_ranks = 1
        """Ranks that keep as much each, and may all be on this node."""
        self._parts: dict[str, _SentPart] = {}
        self._left_out: set[str] = set()
        """Names of weights whose bits are not kept."""
        self._is_full = False
        self.num_bytes = 0
        """Host memory of the bits."""

    @torch.no_grad()
    def changes(self, weight: TensorMetadata, part: Part, word_sum: int, *, is_known: bool) -> Changes | None:
        """Changes of a part since the last sync; None where all of it has to travel. It is the last one from now on.

        Args:
            weight: of which it is a part.
            part: as this rank has it now.
            word_sum: of it.
            is_known: every receiver holds the weights of the last sync.
        """
        name, kind = weight.name, _INTEGERS.get(weight.dtype.itemsize)
        last = self._parts.get(name)
        if last is not None and (last.dtype, last.places) != (weight.dtype, part.places):
            self._forget_bits(last)
            last = None
        if last is None:
            last = self._parts[name] = _SentPart(weight.dtype, part.places, word_sum)
            is_known = False
        is_same, last.word_sum = last.word_sum == word_sum, word_sum
        if is_known and is_same:
            return Changes(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=kind or torch.uint8))
        if kind is None or name in self._left_out:
            return None
        if last.bits is None:
            self._keep(name, last, part, kind)
            return None
        changes = changes_between(last.bits, _bits_in_pieces(part, kind)) if is_known else None
        if changes is None and is_known and weight.dtype.itemsize > 2:
            self._left_out.add(name)
            self._forget_bits(last)
        elif changes is None:
            _copy_bits(part, kind, last.bits)
        return changes

    def clear(self) -> None:
        """Forget everything."""
        for part in self._parts.values():
            self._forget_bits(part)
        self._parts.clear()
        self._left_out.clear()

    def _keep(self, name: str, last: _SentPart, part: Part, kind: torch.dtype) -> None:
        """Keep the bits of a part, unless that would take more memory than is left then."""
        num_bytes = part.places.num_bytes
        if self.num_ranks * (self.num_bytes + num_bytes) <= self._free_bytes() - self.num_ranks * num_bytes:
            last.bits = torch.empty(num_bytes // kind.itemsize, dtype=kind)
            _copy_bits(part, kind, last.bits)
            self.num_bytes += num_bytes
            return
        self._left_out.add(name)
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "host memory has room for %.1f GB of the weights of the last sync; of the others no changes are sent, "
                "they travel whole",
                self.num_bytes / 1e9,
            )

    def _forget_bits(self, part: _SentPart) -> None:
        self.num_bytes -= 0 if part.bits is None else part.bits.nbytes
        part.bits = None


def _bits_in_pieces(part: Part, kind: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Bits of a part [n] in host memory, piece by piece, each behind the number of its first element."""
    for start, content in part.blocks(kind.itemsize):
        yield start // kind.itemsize, content.view(kind).cpu()


def _copy_bits(part: Part, kind: torch.dtype, bits: Tensor) -> None:
    """Copy all bits of a part [numel]."""
    for start, piece in _bits_in_pieces(part, kind):
        bits[start : start + len(piece)].copy_(piece)


def _gaps_start(itemsize: int, count: int) -> int:
    """First byte of the gaps behind so many values."""
    return -(-count * itemsize // _GAP_BYTES) * _GAP_BYTES


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
