"""Places in a bucket: where each rank's bytes of some weights lie, from what the ranks tell each other of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor

from strop.engines.weight_parts import Runs
from strop.engines.weights import TensorMetadata
from strop.rollout.weight_sync.delta import ChangedPart, changes_num_bytes
from strop.rollout.weight_sync.stream import ALIGNMENT

_NUMBERS = 5
"""Of one offer."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Part of a weight that a rank holds."""

    places: Runs
    num_changed: int
    """Elements to send as changes; -1 where all of it has to travel."""

    def to_numbers(self) -> list[int]:
        """As the ranks tell it to each other."""
        return [*self.places.to_json(), self.num_changed]


NOTHING = [0] * _NUMBERS
"""Numbers of a rank that holds nothing of a weight."""
Offers = Sequence[Offer | None]
"""Of one weight by each rank, or of some weights by one; None where a rank holds nothing."""


def offers_of(numbers: Sequence[int]) -> list[Offer | None]:
    """Offers of some weights, from the numbers of one rank."""
    rows = [numbers[start : start + _NUMBERS] for start in range(0, len(numbers), _NUMBERS)]
    return [_offer(*row) if row[2] else None for row in rows]


@lru_cache(maxsize=1 << 16)
def _offer(first: int, stride: int, count: int, length: int, num_changed: int) -> Offer:
    """An offer of the sync before, mostly."""
    return Offer(places=Runs.from_json([first, stride, count, length]), num_changed=num_changed)


class Layout:
    """Places of weights in a bucket, and of each rank's bytes of them."""

    def __init__(self, *, num_ranks: int) -> None:
        self.entries: list[tuple[TensorMetadata, int]] = []
        self.changes: dict[str, tuple[ChangedPart, ...]] = {}
        self.num_bytes = 0
        self._places: list[list[Runs]] = [[] for _ in range(num_ranks)]

    def starts(self, bucket_bytes: int) -> Iterable[int]:
        """First bytes of the buckets of this size into which it is cut."""
        return range(0, max(1, self.num_bytes), bucket_bytes) if self.entries else ()

    def add_whole(self, weight: TensorMetadata, offers: Offers) -> None:
        """A weight of which every rank gives its part."""
        start = self._aligned()
        self.entries.append((weight, start))
        for rank, offer in enumerate(offers):
            if offer is not None:
                self._places[rank].append(replace(offer.places, first=start + offer.places.first))
        self.num_bytes = start + weight.num_bytes

    def add_changes(self, weight: TensorMetadata, offers: Offers) -> None:
        """A weight of which every rank gives the changes of its part, if there are any."""
        self.entries.append((weight, self._aligned()))
        parts: list[ChangedPart] = []
        for rank, offer in enumerate(offers):
            if offer is None or not offer.num_changed:
                continue
            start, size = self._aligned(), changes_num_bytes(weight.dtype.itemsize, offer.num_changed)
            parts.append(ChangedPart(offset=start, count=offer.num_changed, places=offer.places))
            self._places[rank].append(Runs(first=start, stride=0, count=1, length=size))
            self.num_bytes = start + size
        self.changes[weight.name] = tuple(parts)

    def pieces(self, start: int, stop: int) -> tuple[tuple[Runs, ...], ...]:
        """Places of each rank in bytes [start, stop), counted from `start`."""
        return tuple(
            tuple(piece for places in own for piece in places.within(start, stop)) for own in self._places
        )

    def _aligned(self) -> int:
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


def cut_to_places(contents: Iterable[Tensor], places: Sequence[Runs]) -> Iterator[Tensor]:
    """Bytes [n] uint8 of each place, of contents each of which fills a number of places; views."""
    rest, source = None, iter(contents)
    for runs in places:
        content = next(source) if rest is None or not len(rest) else rest
        yield content[: runs.num_bytes]
        rest = content[runs.num_bytes :]
