"""Results that workers still hold, passed on without a look at them.

A future is a list of parts in row order, each of which one worker computes. `chunk` gives every receiver
the parts of its own rows, so no receiver fetches the rows of another. `get` is the only wait; who made the
parts (the runtime of the worker group) answers for their deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from strop.protocol.indices import balanced_ranges

if TYPE_CHECKING:
    from strop.protocol.batch import DataProto

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A value that is being computed; `concurrent.futures.Future` is one."""

    def result(self) -> T_co:
        """Wait for the value; an error of the computation is raised here."""


@dataclass(frozen=True)
class Done(Generic[T]):
    """A value that is there already."""

    value: T
    """The value."""

    def result(self) -> T:
        """The value, at once."""
        return self.value


@dataclass(frozen=True)
class DataProtoFuture:
    """A batch whose parts workers still hold, in row order."""

    parts: tuple[Pending[DataProto], ...]
    """What each worker computes; their rows follow one another."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a DataProtoFuture needs at least one part; a group has at least one worker")

    def get(self) -> DataProto:
        """Wait for all parts and join them."""
        first, *others = (part.result() for part in self.parts)
        return first.concat([first, *others])

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Cut into `chunks` futures in row order.

        With one part per chunk nothing is waited for. Otherwise the parts are waited for here, because
        only their lengths tell where to cut; each chunk still holds just the parts with its own rows.
        """
        if chunks == len(self.parts):
            return [DataProtoFuture((part,)) for part in self.parts]
        held = [part.result() for part in self.parts]
        total = sum(len(part) for part in held)
        return [
            DataProtoFuture(tuple(Done(piece) for piece in _cut(held, start, stop)))
            for start, stop in balanced_ranges(total, chunks)
        ]


def _cut(held: Sequence[DataProto], start: int, stop: int) -> list[DataProto]:
    """Rows `start` to `stop` of consecutive batches, as views; one empty view where there are none."""
    pieces: list[DataProto] = []
    offset = 0
    for part in held:
        first, last = max(start - offset, 0), min(stop - offset, len(part))
        if first < last:
            pieces.append(part.slice(first, last))
        offset += len(part)
    return pieces or [held[0].slice(0, 0)]
