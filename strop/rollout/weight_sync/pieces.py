"""Weights leave their shards over the network, or through a store: each rank sends its own part of every bucket.

Nothing is gathered. The ranks tell each other which bytes of the next weights they hold and how many elements of them
changed since the last sync (delta.py). So all know what travels of each weight: all, its changes, or nothing. Rank 0
announces the bucket, in which every rank has its places, and each sends what belongs there. Beside the shards a rank
holds two pieces, one on its way and one that is being filled.

Only a weight whose parts do not lie between the words of its digest, as a matrix with an odd number of bytes in a row
does, goes over the ranks of the actor too, to be added up.

Concurrency: `PieceStream` is iterated by all ranks at the same time, in the same order. Rank 0 may end it early by
`close`; a rank that fails is heard of by rank 0, and by the others when rank 0 ends. Each rank then closes its
transport, so that no receiver waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from strop.engines.checksum import host
from strop.engines.checksum.tensors import WORD_BYTES, finish
from strop.engines.weight_parts import Part, Runs
from strop.engines.weights import TensorMetadata, WeightsMetadata
from strop.rollout.weight_sync.delta import ChangedPart, Changes, SentParts, changes_num_bytes, write_changes
from strop.rollout.weight_sync.sender_ranks import SenderRanks
from strop.rollout.weight_sync.shards import OwnParts
from strop.rollout.weight_sync.stream import ALIGNMENT, Bucket, groups, next_weight, own_weights
from strop.rollout.weight_sync.transport import SendingTransport

logger = logging.getLogger(__name__)

_FINE, _FAILED, _LOST = 0, 1, 2
"""State of a rank: _LOST is one that cannot send, which the receivers or the network have caused."""
_NUMBERS = 5
"""Of one offer, as the ranks tell it to each other."""


class PieceTransport(SendingTransport, Protocol):
    """One rank's way to the receivers."""

    def wait_for_room(self) -> None:
        """On rank 0: wait until the receivers have taken so many buckets that all ranks may send another one."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """Part of a weight that a rank holds."""

    places: Runs
    num_changed: int
    """Elements to send as changes; -1 where all of it has to travel."""


@dataclass(frozen=True, kw_only=True)
class _Own:
    """This rank's part of a weight; None where it gives nothing."""

    part: Part | None = None
    word_sum: int = 0
    changes: Changes | None = None


class PieceStream:
    """All weights of a model that the receivers do not hold yet, in buckets of which each rank sends its pieces; rank 0
    gets their announcements, before its own piece is sent, the others nothing."""

    def __init__(
        self,
        module: nn.Module,
        metadata: WeightsMetadata,
        *,
        bucket_bytes: int,
        transport: PieceTransport,
        ranks: SenderRanks,
        last: SentParts,
        is_known: bool,
        weights: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Args:
        module: plain, or sharded over these ranks.
        metadata: of its weights, in the dtypes in which they leave.
        bucket_bytes: limit of a bucket; a larger tensor is a number of buckets.
        transport: of this rank to the receivers.
        ranks: all that hold the model.
        last: this rank's parts as they were sent last.
        is_known: every receiver holds the weights of the last sync.
        weights: as of `stream.parameter_stream`; shards, or tensors that are whole on every rank.
        """
        self._metadata, self._parts = metadata, OwnParts(module, ranks)
        self._source = _tensors(module, metadata, weights)
        self._bucket_bytes = max(ALIGNMENT, bucket_bytes // ALIGNMENT * ALIGNMENT)
        self._transport, self._ranks, self._last, self._is_known = transport, ranks, last, is_known
        self._sums: dict[str, int] = dict.fromkeys((weight.name for weight in metadata), 0)
        self._staging = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self._failure: Exception | None = None
        self._buckets = self._send_all()
        self._is_over = False
        self.digests: dict[str, int] = {}
        """Of every weight by name, on every rank, once all buckets were sent."""
        self.unchanged: list[str] = []
        """Names of the weights that the receivers hold already."""
        self.sent_bytes = 0
        """Bytes that this rank has sent."""

    def __iter__(self) -> Iterator[Bucket]:
        """The buckets, on rank 0 alone."""
        return self._buckets

    @property
    def is_complete(self) -> bool:
        """Everything was sent."""
        return bool(self.digests)

    def close(self) -> None:
        """Tell the other ranks, if they wait for another bucket, that none comes. Rank 0 alone calls this."""
        if not self._is_over:
            self._is_over = True
            self._ranks.go_on(False)

    def _send_all(self) -> Iterator[Bucket]:
        self._do(self._transport.begin)
        for group in groups(self._metadata, self._bucket_bytes):
            if not self._goes_on():
                return
            own = self._own_parts(group)
            heard = self._heard([number for one in own for number in _as_numbers(one)])
            if heard is None:
                return
            offers = [_offers(row) for row in heard]
            self._add_up(group, own, offers)
            for number, bucket in enumerate(self._buckets_of(group, own, offers)):
                if number and not self._goes_on():
                    return
                if self._ranks.rank == 0:
                    yield bucket
                self.sent_bytes += len(bucket.data)
                self._do(lambda data=bucket.data: self._transport.send(data))  # type: ignore[misc]
        self._do(self._transport.finish)
        if not self._goes_on():
            return
        if extra := next(self._source, None):
            self._failure = ValueError(
                f"the weights go on with {extra[0]} after the last one of the model's own"
            )
        if self._heard([]) is None:
            return
        self._is_over = True
        totals = self._ranks.added([self._sums[weight.name] for weight in self._metadata])
        self.digests = {
            weight.name: finish(total, weight.num_bytes)
            for weight, total in zip(self._metadata, totals, strict=True)
        }

    def _goes_on(self) -> bool:
        """Rank 0 goes on, once there is room."""
        if self._ranks.rank == 0:
            self._transport.wait_for_room()
        return self._ranks.go_on(True)

    def _do(self, call: Callable[[], object]) -> None:
        """A step of the transport. On rank 0 a failure is raised, and `close` lets the others know; they tell of theirs
        when they are next heard."""
        if self._failure is not None:
            return
        try:
            call()
        except Exception as error:
            if self._ranks.rank == 0:
                raise
            self._failure = error

    def _own_parts(self, group: Sequence[TensorMetadata]) -> list[_Own]:
        """This rank's parts of some weights; nothing of any where one cannot be given, which `_heard` tells of."""
        try:
            own = []
            for weight in group:
                part = self._parts.of(weight, next_weight(self._source, weight))
                if part is None:
                    own.append(_Own())
                    continue
                total = part.word_sum(weight.num_bytes)
                changes = self._last.changes(weight, part, total, is_known=self._is_known)
                own.append(_Own(part=part, word_sum=total, changes=changes))
            return own
        except Exception as error:  # noqa: BLE001  (raised once the others know of it)
            self._failure = self._failure or error
            return [_Own() for _ in group]

    def _heard(self, numbers: list[int]) -> list[list[int]] | None:
        """These numbers of every rank. Where one has failed every rank raises: its own error, or that another has one.
        Where one has lost the receivers, rank 0 raises, which says what came of the sync; the others get None."""
        is_lost = isinstance(self._failure, ConnectionError | TimeoutError)
        state = _FINE if self._failure is None else _LOST if is_lost else _FAILED
        rows = self._ranks.gathered([state, *numbers])
        failed = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
        lost = [rank for rank, row in enumerate(rows) if row[0] == _LOST]
        self._is_over = bool(failed or lost)
        if failed:
            raise (self._failure if state == _FAILED else None) or RuntimeError(
                f"rank {failed[0]} of the actor could not give its part of the weights; its log says why"
            )
        if not lost:
            return [row[1:] for row in rows]
        if self._failure is not None:
            logger.warning("rank %d of the actor cannot send weights: %s", self._ranks.rank, self._failure)
        if self._ranks.rank == 0:
            raise ConnectionError(f"rank {lost[0]} of the actor could not send its part; its log says why")
        return None

    def _add_up(
        self, group: Sequence[TensorMetadata], own: Sequence[_Own], offers: Sequence[Sequence[_Offer | None]]
    ) -> None:
        """Enter the word sums of some weights."""
        for index, weight in enumerate(group):
            parts = [row[index] for row in offers]
            if all(offer is None or offer.places.is_between_words(weight.num_bytes) for offer in parts):
                self._sums[weight.name] += own[index].word_sum
                continue
            for start in range(0, weight.num_bytes, self._bucket_bytes):
                window = torch.zeros(min(self._bucket_bytes, weight.num_bytes - start), dtype=torch.uint8)
                part = own[index].part
                if part is not None:
                    part.fill(window, start)
                self._ranks.summed(window)
                each = -(-len(window) // (WORD_BYTES * self._ranks.size)) * WORD_BYTES
                share = window[self._ranks.rank * each : (self._ranks.rank + 1) * each]
                if len(share):
                    first_byte = start + self._ranks.rank * each
                    self._sums[weight.name] += int(host.word_sum(share, first_byte=first_byte))

    def _buckets_of(
        self, group: Sequence[TensorMetadata], own: Sequence[_Own], offers: Sequence[Sequence[_Offer | None]]
    ) -> Iterator[Bucket]:
        """Buckets of some weights: one, none, or several of one large weight."""
        layout = _Layout(num_ranks=self._ranks.size)
        contents: list[Part | Tensor] = []
        for index, weight in enumerate(group):
            part, changes, parts = own[index].part, own[index].changes, [row[index] for row in offers]
            counts = [offer.num_changed for offer in parts if offer is not None]
            changed_bytes = sum(
                changes_num_bytes(weight.dtype.itemsize, n) + ALIGNMENT for n in counts if n > 0
            )
            if self._is_known and not any(counts):
                self.unchanged.append(weight.name)
            elif min(counts, default=-1) >= 0 and changed_bytes - ALIGNMENT < min(
                weight.num_bytes, self._bucket_bytes
            ):
                layout.add_changes(weight, parts)
                if changes is not None and len(changes.positions):
                    contents.append(write_changes(changes))
            else:
                layout.add_whole(weight, parts)
                if part is not None:
                    contents.append(part)
        if not layout.entries:
            return
        for start in range(0, max(1, layout.num_bytes), self._bucket_bytes):
            stop, is_cut = (
                min(layout.num_bytes, start + self._bucket_bytes),
                layout.num_bytes > self._bucket_bytes,
            )
            pieces = layout.pieces(start, stop)
            window = (start, stop) if is_cut else None
            yield Bucket(
                entries=tuple(layout.entries), num_bytes=stop - start,
                data=self._joined([_content(one, window) for one in contents], pieces[self._ranks.rank], stop - start),
                start=start if is_cut else None, changes=layout.changes,
                pieces=() if self._ranks.size == 1 else pieces,
            )  # fmt: skip

    def _joined(self, contents: Sequence[Tensor], places: Sequence[Runs], num_bytes: int) -> Tensor:
        """This rank's piece: its contents one behind the other; all of the bucket where it is alone."""
        is_alone = self._ranks.size == 1
        size = num_bytes if is_alone else sum(len(content) for content in contents)
        if len(contents) == 1 and len(contents[0]) == size:
            return contents[0]
        self._staging.reverse()  # the other one may be on its way
        device = contents[0].device if contents else self._staging[0].device
        if len(self._staging[0]) < size or self._staging[0].device != device:
            self._staging[0] = torch.empty(size, dtype=torch.uint8, device=device)
        data, at = self._staging[0][:size], 0
        for index, content in enumerate(contents):
            at = places[index].first if is_alone else at
            data[at : at + len(content)].copy_(content)
            at += len(content)
        return data


class _Layout:
    """Places of weights in a bucket, and of each rank's bytes of them."""

    def __init__(self, *, num_ranks: int) -> None:
        self.entries: list[tuple[TensorMetadata, int]] = []
        self.changes: dict[str, tuple[ChangedPart, ...]] = {}
        self.num_bytes = 0
        self._places: list[list[Runs]] = [[] for _ in range(num_ranks)]

    def add_whole(self, weight: TensorMetadata, offers: Sequence[_Offer | None]) -> None:
        """A weight of which every rank gives its part."""
        start = self._aligned()
        self.entries.append((weight, start))
        for rank, offer in enumerate(offers):
            if offer is not None:
                self._places[rank].append(replace(offer.places, first=start + offer.places.first))
        self.num_bytes = start + weight.num_bytes

    def add_changes(self, weight: TensorMetadata, offers: Sequence[_Offer | None]) -> None:
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


def _tensors(
    module: nn.Module, metadata: WeightsMetadata, weights: Iterable[tuple[str, Tensor]] | None
) -> Iterator[tuple[str, Tensor]]:
    """Weights that are sent; an error in them is raised with the first one, where the ranks tell each other of it."""
    yield from own_weights(module, metadata) if weights is None else weights


def _content(one: Part | Tensor, window: tuple[int, int] | None) -> Tensor:
    """Bytes that a rank gives: changes as they are, and of a part all, or those in a window of its weight."""
    if isinstance(one, Tensor):
        return one
    return one.runs.view(-1) if window is None else one.between(*window)


def _as_numbers(own: _Own) -> list[int]:
    if own.part is None:
        return [0] * _NUMBERS
    return [*own.part.places.to_json(), -1 if own.changes is None else len(own.changes.positions)]


def _offers(numbers: Sequence[int]) -> list[_Offer | None]:
    rows = [numbers[start : start + _NUMBERS] for start in range(0, len(numbers), _NUMBERS)]
    return [_Offer(places=Runs.from_json(row[:4]), num_changed=row[4]) if row[2] else None for row in rows]
