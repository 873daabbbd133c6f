"""Weights leave their shards for memory that all ranks of the sender see: each puts its own part where it belongs.

Nothing is gathered. Rank 0 says which bytes of which weight come next and where; every rank copies its part of them,
row by row or column by column, and adds up the digest on the way; when all are done, rank 0 hands the bucket on. Beside
the shards there are the buckets in the shared memory, whatever the size of the model or of a tensor.

Concurrency: `ShardStream` is iterated by all ranks at the same time, in the same order. Rank 0 may end it early by
`close`; a rank that fails is heard of by rank 0, and by the others when rank 0 ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from strop.engines.checksum import host
from strop.engines.weight_parts import Part
from strop.engines.weights import TensorMetadata
from strop.rollout.weight_sync.own_parts import OwnParts
from strop.rollout.weight_sync.stream import Bucket, placed


class Slots(Protocol):
    """Memory for the buckets, the same on every rank."""

    def room(self, num_bytes: int) -> Tensor:
        """Memory [n] uint8 of the next bucket; rank 0 waits until it is free."""
        ...

    def settle(self) -> None:
        """Wait until what this rank has put there is there."""
        ...


class ShardStream:
    """All weights of a model, in buckets that its ranks fill together; rank 0 gets them, the others nothing."""

    def __init__(self, parts: OwnParts, slots: Slots) -> None:
        """Put the parts of this rank there."""
        self._parts, self._slots, self._ranks = parts, slots, parts.ranks
        self._buckets = self._fill_all()
        self._is_over = False
        self.digests: dict[str, int] = {}
        """Of every weight by name, on every rank, once all buckets were taken."""

    def __iter__(self) -> Iterator[Bucket]:
        """The buckets, on rank 0 alone; each is valid until the next one is asked for."""
        return self._buckets

    def close(self) -> None:
        """Tell the other ranks, if they wait for another bucket, that none comes. Rank 0 alone calls this."""
        if not self._is_over:
            self._is_over = True
            self._ranks.go_on(False)

    def _fill_all(self) -> Iterator[Bucket]:
        failure: Exception | None = None
        bucket_bytes = self._parts.bucket_bytes
        for group in self._parts.groups:
            entries, size = placed(group)
            parts: list[Part | None] = []
            window: Tensor | None
            for start in range(0, size, bucket_bytes):
                window, num_bytes = None, min(size - start, bucket_bytes)
                if self._ranks.rank == 0:
                    window = self._slots.room(num_bytes)
                if not self._ranks.go_on(True):
                    return
                added: list[int | None] = [0] * len(entries)
                try:
                    window = self._slots.room(num_bytes) if window is None else window
                    parts = parts or [self._parts.next(weight) for weight in group]
                    added = self._fill(entries, parts, window, start)
                    self._slots.settle()
                except Exception as error:  # noqa: BLE001  (raised once the others know of it)
                    failure = error
                lacking = self._raise_together(failure, [total is None for total in added])
                assert window is not None, "there was room"
                self._add_up(entries, added, lacking, window, start)
                if self._ranks.rank == 0:
                    yield Bucket(
                        entries=entries,
                        data=window,
                        num_bytes=num_bytes,
                        start=start if size > bucket_bytes else None,
                    )
            del parts  # before those of the next weights are made
        if not self._ranks.go_on(True):
            return
        self._is_over = True
        try:
            self._parts.check_end()
        except Exception as error:  # noqa: BLE001  (raised once the others know of it)
            failure = error
        self._raise_together(failure)
        self.digests = self._parts.digests()

    def _raise_together(self, failure: Exception | None, lacks: Sequence[bool] = ()) -> list[bool]:
        """Every rank raises where one has failed: its own error, or that another has one.

        Returns:
            For each value of `lacks`, whether any rank says so.
        """
        failed, lacking = self._ranks.failed(failure is not None, lacks)
        if failed:
            self._is_over = True
            raise failure or RuntimeError(
                f"rank {failed[0]} of the actor could not give its part of the weights; its log says why"
            )
        return lacking

    def _fill(
        self,
        entries: Sequence[tuple[TensorMetadata, int]],
        parts: Sequence[Part | None],
        window: Tensor,
        start: int,
    ) -> list[int | None]:
        """Put this rank's parts into the bucket; the word sum of each, None where it was not taken on the way."""
        added: list[int | None] = []
        for (weight, offset), part in zip(entries, parts, strict=True):
            place, first = _place(weight, offset, window, start)
            added.append(0 if part is None else part.fill(place, first))
        return added

    def _add_up(
        self,
        entries: Sequence[tuple[TensorMetadata, int]],
        added: Sequence[int | None],
        lacking: Sequence[bool],
        window: Tensor,
        start: int,
    ) -> None:
        """Enter the word sums of what lies in the bucket. Weights of which any rank has none are read there, by each
        rank a share of the bytes."""
        for (weight, offset), own, is_lacking in zip(entries, added, lacking, strict=True):
            if own is not None and not is_lacking:
                self._parts.word_sums[weight.name] += own
                continue
            place, first = _place(weight, offset, window, start)
            self._parts.word_sums[weight.name] += host.word_sum_of_share(
                place, first_byte=first, rank=self._ranks.rank, num_ranks=self._ranks.size
            )


def _place(weight: TensorMetadata, offset: int, window: Tensor, start: int) -> tuple[Tensor, int]:
    """Bytes of a bucket that a weight has, and the first of its bytes among them."""
    if offset == 0 and start:
        return window, start
    return window[offset : min(len(window), offset + weight.num_bytes)], 0
