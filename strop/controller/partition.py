"""Assignment of rows to data-parallel groups by the caller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strop.protocol.columns import BatchError
from strop.protocol.data_proto import DataProto


class Partition:
    """A batch cut by its caller, to be passed to a group wherever a mode takes a batch.

    The parts may be unequal and empty. Every batch of the call is cut alike, and what is joined from the
    workers comes back in the order of the batch's rows, not of the parts.
    """

    def __init__(self, data: DataProto, parts: Sequence[Sequence[int]]) -> None:
        """Check the parts; a batch that workers still compute is waited for.

        Args:
            data: the batch.
            parts: for each data-parallel group, in its order, the numbers of its rows in any order.

        Raises:
            ValueError: a row is in no part or in two, or does not exist.
        """
        self.data = data
        """The batch."""
        self.parts = tuple(_row_array(part, number) for number, part in enumerate(parts))
        """For each data-parallel group, the numbers of its rows."""
        _check_parts(self.parts, len(data))

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def same_parts(self, other: Partition) -> bool:
        """True where another batch is cut into the same parts."""
        return len(self.parts) == len(other.parts) and all(map(np.array_equal, self.parts, other.parts))

    def order_of_results(self, lengths: Sequence[int]) -> NDArray[np.int64] | None:
        """Positions of the batch's rows in the results of the parts, laid end to end; None where no result has rows.

        Args:
            lengths: how many rows were made of each part.

        Raises:
            BatchError: of a part another number of rows was made than it has.
        """
        if not any(lengths):  # parts that hold facts and no rows need no order
            return None
        for number, (length, part) in enumerate(zip(lengths, self.parts, strict=True)):
            if length != len(part):
                raise BatchError(
                    f"part {number} of a result has {length} rows, but {len(part)} rows were asked of it, so the "
                    f"result cannot be put into the order of the caller's rows; return one row for each row, or pass "
                    f"the batch without a Partition"
                )
        return np.argsort(np.concatenate(self.parts))


def _row_array(part: Sequence[int], number: int) -> NDArray[np.int64]:
    rows = np.asarray(part)
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise ValueError(f"part {number} of a Partition is a list of row numbers, got {part!r}")
    return rows.astype(np.int64)


def _check_parts(parts: Sequence[NDArray[np.int64]], length: int) -> None:
    holder: dict[int, int] = {}
    for number, part in enumerate(parts):
        for row in part.tolist():
            if not 0 <= row < length:
                raise ValueError(
                    f"part {number} of a Partition has row {row}, but the batch has {length} rows; rows count from 0"
                )
            if row in holder:
                raise ValueError(
                    f"row {row} is twice in a Partition: in part {holder[row]} and in part {number}; each row goes "
                    f"to one data-parallel group"
                )
            holder[row] = number
    missing = [row for row in range(length) if row not in holder]
    if missing:
        raise ValueError(
            f"{len(missing)} of {length} rows are in no part of a Partition, the first is row {missing[0]}; give "
            f"each row to one data-parallel group, or pass a batch of the wanted rows only"
        )
