"""Weights leave their shards over the network, or through a store: each rank sends its own part of every bucket.

Nothing is gathered. The ranks tell each other which bytes of the next weights they hold and how many elements of them
changed since the last sync (delta.py). So all know what travels of each weight: all, its changes, or nothing. Rank 0
announces the bucket, in which every rank has its places, and each sends what belongs there, out of the memory where it
lies; through host memory the next bucket is made ready meanwhile. Beside the shards a rank holds, of three buckets at
most, what it casts, what the transport joins, and the positions of the changes.

Only a weight whose parts do not lie between the words of its digest, as a matrix with an odd number of bytes in a row
does, goes over the ranks of the actor too, to be added up.

Concurrency: `PieceStream` is iterated by all ranks at the same time, in the same order. Rank 0 may end it early by
`close`. A rank that fails closes its transport at once, so that no receiver waits for it, takes part in what the ranks
do together, and is heard of by all before the next bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from strop.engines.checksum import host
from strop.engines.weight_parts import Part, Runs
from strop.engines.weights import TensorMetadata
from strop.rollout.weight_sync.delta import Changes, SentParts, changes_num_bytes, write_changes
from strop.rollout.weight_sync.own_parts import OwnParts
from strop.rollout.weight_sync.piece_layout import NOTHING, Layout, Offer, Offers, cut_to_places, offers_of
from strop.rollout.weight_sync.stream import ALIGNMENT, Announcement
from strop.rollout.weight_sync.transport import SendingTransport

logger = logging.getLogger(__name__)

_FINE, _FAILED, _LOST, _OVER = 0, 1, 2, 3
"""State of a rank: _LOST is one that cannot send, which the receivers or the network have caused; with _OVER rank 0
ends the stream."""

T = TypeVar("T")


class PieceTransport(SendingTransport, Protocol):
    """One rank's way to the receivers."""

    @property
    def max_bucket_bytes(self) -> int:
        """Limit of a bucket, the same on every rank."""
        ...

    @property
    def needs_room(self) -> bool:
        """`wait_for_room` has something to wait for."""
        ...

    def wait_for_room(self) -> None:
        """On rank 0: wait until the receivers have taken so many buckets that all ranks may send another one."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Own:
    """This rank's part of a weight; None where it gives nothing."""

    part: Part | None = None
    word_sum: int = 0
    changes: Changes | None = None

    @property
    def numbers(self) -> list[int]:
        """As the ranks tell it to each other."""
        if self.part is None:
            return NOTHING
        num_changed = -1 if self.changes is None else len(self.changes.positions)
        return Offer(places=self.part.places, num_changed=num_changed).to_numbers()


class PieceStream:
    """All weights of a model that the receivers do not hold yet, in buckets of which each rank sends its pieces; rank 0
    gets their announcements, before its own piece is sent, the others nothing."""

    def __init__(
        self, parts: OwnParts, transport: PieceTransport, *, last: SentParts, is_known: bool
    ) -> None:
        """Args:
        parts: that this rank gives.
        transport: of this rank to the receivers.
        last: this rank's parts as they were sent last.
        is_known: every receiver holds the weights of the last sync.
        """
        self._parts, self._ranks = parts, parts.ranks
        self._transport, self._last, self._is_known = transport, last, is_known
        last.num_ranks = parts.ranks.size
        self._num_next = self._num_told_for(0)
        """Numbers that the other ranks tell next, should this one give up."""
        self._failure: Exception | None = None
        self._buckets = self._send_all()
        self._is_over = False
        self.digests: dict[str, int] = {}
        """Of every weight by name, on every rank, once all buckets were sent."""
        self.unchanged: list[str] = []
        """Names of the weights that the receivers hold already."""
        self.sent_bytes = 0
        """Bytes that this rank has sent."""

    def __iter__(self) -> Iterator[Announcement]:
        """Announcements of the buckets, on rank 0 alone."""
        return self._buckets

    @property
    def is_complete(self) -> bool:
        """Everything was sent."""
        return bool(self.digests)

    def close(self) -> None:
        """Tell the other ranks, if they wait for another bucket, that none comes. Rank 0 alone calls this."""
        if not self._is_over:
            self._is_over = True
            self._ranks.gathered([_OVER, *[0] * self._num_next])

    def _send_all(self) -> Iterator[Announcement]:
        self._do(self._transport.begin)
        for index, group in enumerate(self._parts.groups):
            if self._is_over or (self._transport.needs_room and not self._goes_on()):
                return
            own = self._own_parts(group)
            heard = self._heard([number for one in own for number in one.numbers])
            if heard is None:
                return
            offers = [offers_of(row) for row in heard]
            self._num_next = 0
            self._add_up(group, own, offers)
            yield from self._send_group(group, own, offers, num_after=self._num_told_for(index + 1))
            del own  # before those of the next weights are cast
        self._do(self._transport.finish)
        self._do(self._parts.check_end)
        if self._is_over or self._heard([]) is None:
            return
        self._is_over = True
        self.digests = self._parts.digests()

    def _send_group(
        self,
        group: Sequence[TensorMetadata],
        own: Sequence[_Own],
        offers: Sequence[Offers],
        *,
        num_after: int,
    ) -> Iterator[Announcement]:
        """Send this rank's pieces of some weights, in one bucket, none, or several of one large weight. A rank that
        has failed sends nothing, and hears with the others when the next bucket comes."""
        layout = self._laid_out(group, offers)
        is_cut = layout.num_bytes > self._parts.bucket_bytes
        self._num_next = 0 if is_cut else num_after
        contents = self._do(_contents, group, own, layout)
        for start in layout.starts(self._parts.bucket_bytes):
            if self._is_over or (start and not self._goes_on()):
                return
            stop = min(layout.num_bytes, start + self._parts.bucket_bytes)
            self._num_next = num_after if stop == layout.num_bytes else 0
            pieces = layout.pieces(start, stop)
            window = (start, stop) if is_cut else None
            if self._ranks.rank == 0:
                yield Announcement(
                    entries=tuple(layout.entries), num_bytes=stop - start, start=start if is_cut else None,
                    changes=layout.changes, pieces=pieces,
                )  # fmt: skip
            self._do(self._send, contents, window, pieces[self._ranks.rank])

    def _num_told_for(self, index: int) -> int:
        """Numbers that the ranks tell each other when they come to this group of weights: of their parts, or, where
        they have to wait for room first, none."""
        if self._transport.needs_room or index >= len(self._parts.groups):
            return 0
        return len(NOTHING) * len(self._parts.groups[index])

    def _goes_on(self) -> bool:
        """All ranks have done their parts so far, and there is room for the next one."""
        if self._is_over or self._heard([]) is None:
            return False
        if not self._transport.needs_room:
            return True
        if self._ranks.rank == 0:
            self._transport.wait_for_room()
        return self._heard([]) is not None

    def _do(self, call: Callable[..., T], *arguments: object) -> T | None:
        """A step of this rank alone; nothing once one has failed. On rank 0 a failure is raised, and `close` lets the
        others know; they tell of theirs when they are next heard. Until then the receivers hear that nothing comes."""
        if self._failure is not None:
            return None
        try:
            return call(*arguments)
        except Exception as error:
            if self._ranks.rank == 0:
                raise
            logger.error("rank %d of the actor cannot send weights: %s", self._ranks.rank, error)
            self._failure = error
            self._transport.close()
            return None

    def _send(
        self, given: Sequence[Part | Tensor], window: tuple[int, int] | None, places: Sequence[Runs]
    ) -> None:
        """Send this rank's piece, out of the memory where its contents lie."""
        contents = list(cut_to_places((_content(one, window) for one in given), places))
        self._transport.send(contents)
        self.sent_bytes += sum(map(len, contents))

    def _own_parts(self, group: Sequence[TensorMetadata]) -> list[_Own]:
        """This rank's parts of some weights; nothing of any where one cannot be given, which `_heard` tells of."""
        try:
            own = []
            for weight in group:
                part = self._parts.next(weight)
                if part is None:
                    own.append(_Own())
                    continue
                if part.is_cast and part.places.num_bytes <= self._parts.bucket_bytes:
                    part = part.cast()  # once; of a larger one what is summed up, compared or sent
                total = part.word_sum(weight.num_bytes)
                changes = self._last.changes(weight, part, total, is_known=self._is_known)
                own.append(_Own(part=part, word_sum=total, changes=changes))
            return own
        except Exception as error:  # noqa: BLE001  (raised once the others know of it)
            self._failure = self._failure or error
            return [_Own() for _ in group]

    def _heard(self, numbers: list[int]) -> list[list[int]] | None:
        """These numbers of every rank; None where the stream has ended.

        Where a rank has failed it raises its error, and the others that there is one; so does rank 0 where a rank has
        lost the receivers, which says what came of the sync, while the others get None.
        """
        is_lost = isinstance(self._failure, ConnectionError | TimeoutError)
        state = _FINE if self._failure is None else _LOST if is_lost else _FAILED
        rows = self._ranks.gathered([state, *numbers])
        states = [row[0] for row in rows]
        self._is_over = any(states)
        if self._failure is not None and state == _FAILED:
            raise self._failure
        if _FAILED in states and states[0] != _OVER:
            raise RuntimeError(
                f"rank {states.index(_FAILED)} of the actor could not give its part of the weights; its log says why"
            )
        if _LOST in states and self._ranks.rank == 0:
            raise ConnectionError(
                f"rank {states.index(_LOST)} of the actor could not send its part; its log says why"
            )
        return None if self._is_over else [row[1:] for row in rows]

    def _add_up(self, group: Sequence[TensorMetadata], own: Sequence[_Own], offers: Sequence[Offers]) -> None:
        """Enter the word sums of some weights."""
        for index, weight in enumerate(group):
            parts = [row[index] for row in offers]
            if all(offer is None or offer.places.is_between_words(weight.num_bytes) for offer in parts):
                self._parts.word_sums[weight.name] += own[index].word_sum
                continue
            for start in range(0, weight.num_bytes, self._parts.bucket_bytes):
                size = min(self._parts.bucket_bytes, weight.num_bytes - start)
                window = self._do(_filled, own[index].part, start, size)
                if self._heard([]) is None:
                    return
                assert window is not None, "no rank has failed"
                self._ranks.summed(window)
                self._parts.word_sums[weight.name] += host.word_sum_of_share(
                    window, first_byte=start, rank=self._ranks.rank, num_ranks=self._ranks.size
                )

    def _laid_out(self, group: Sequence[TensorMetadata], offers: Sequence[Offers]) -> Layout:
        """The bucket of some weights, the same on every rank."""
        layout = Layout(num_ranks=self._ranks.size)
        for index, weight in enumerate(group):
            parts = [row[index] for row in offers]
            counts = [offer.num_changed for offer in parts if offer is not None]
            changed_bytes = sum(
                changes_num_bytes(weight.dtype.itemsize, n) + ALIGNMENT for n in counts if n > 0
            )
            limit = min(weight.num_bytes, self._parts.bucket_bytes)
            if self._is_known and not any(counts):
                self.unchanged.append(weight.name)
            elif min(counts, default=-1) >= 0 and changed_bytes - ALIGNMENT < limit:
                layout.add_changes(weight, parts)
            else:
                layout.add_whole(weight, parts)
        return layout


def _contents(group: Sequence[TensorMetadata], own: Sequence[_Own], layout: Layout) -> list[Part | Tensor]:
    """Bytes that a rank gives of the weights of a bucket."""
    names, contents = {weight.name for weight, _ in layout.entries}, list[Part | Tensor]()
    for weight, one in zip(group, own, strict=True):
        if weight.name in layout.changes:
            if one.changes is not None and len(one.changes.positions):
                contents.append(write_changes(one.changes))
        elif weight.name in names and one.part is not None:
            contents.append(one.part)
    return contents


def _content(one: Part | Tensor, window: tuple[int, int] | None) -> Tensor:
    """Bytes that a rank gives: changes as they are, and of a part all, or those in a window of its weight."""
    if isinstance(one, Tensor):
        return one
    return one.given(0, one.places.num_bytes) if window is None else one.between(*window)


def _filled(part: Part | None, start: int, size: int) -> Tensor:
    """Bytes [size] uint8 of a weight from `start` on: those of this part, and zeros."""
    window = torch.zeros(size, dtype=torch.uint8)
    if part is not None:
        part.fill(window, start)
    return window
