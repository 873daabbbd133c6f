"""One sync on the side of a rollout worker, from its begin to the verdict: buckets are loaded and verified."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from strop.engines.checksum.models import combine_digests
from strop.engines.weight_parts import Runs
from strop.engines.weights import TensorMetadata, WeightsMetadata
from strop.rollout.weight_sync import device_slots, shared_memory
from strop.rollout.weight_sync.accounting import TransferState
from strop.rollout.weight_sync.channel import ReceiverChannel
from strop.rollout.weight_sync.delta import ChangedPart, Changes
from strop.rollout.weight_sync.host_copy import HostCopy
from strop.rollout.weight_sync.stream import tensor_at, weight_from_json, weights_from_json
from strop.rollout.weight_sync.target import ChangesTarget, PartTarget, WeightTarget
from strop.rollout.weight_sync.transport import Plan, ReceivingTransport
from strop.rollout.weight_sync.types import REFUSAL, SyncCorrupted, SyncReport
from strop.utils.json_messages import Message


class IncomingSync:
    """One sync, from its begin to the verdict."""

    def __init__(
        self, channel: ReceiverChannel, open_transport: Callable[[Plan], ReceivingTransport], begin: Message,
        version: int, *, holds_base: bool,
    ) -> None:  # fmt: skip
        """Args:
        channel: to the sender.
        open_transport: gives the transport of a plan.
        begin: the sender's message.
        version: policy version.
        holds_base: the engine holds the weights of the sender's last sync.
        """
        self._channel, self._open_transport, self._begin = channel, open_transport, begin
        self._holds_base = holds_base
        self._version = version
        self._num_bytes = 0
        """Bytes of the buckets so far."""
        self._whole = torch.empty(0, dtype=torch.uint8)
        """A weight that arrives in parts, for a target that takes whole ones."""

    def run(self, engine: WeightTarget, copy: HostCopy, started: float) -> SyncReport:
        """Load and verify everything."""
        with self._understood():
            sent = weights_from_json(self._begin["weights"])
            plan = Plan(**self._begin["plan"])
        target: WeightTarget = engine
        if plan.name in (device_slots.PLAN_NAME, shared_memory.PLAN_NAME):
            copy.clear()  # nothing is kept where all weights travel whole
        elif not isinstance(engine, ChangesTarget):
            target = copy
        transfer = TransferState(self._version, sent, engine.weights_metadata(), holds_base=self._holds_base)
        try:
            transport = self._open_transport(plan)
            self._channel.tell("ready", number=int(self._holds_base))
            commit = self._load(transfer, target, transport)
            unchanged = transfer.keep([str(name) for name in commit.get("unchanged", ())])
            if isinstance(target, HostCopy):
                target.load_unchanged(unchanged)
            transfer.check_complete()
            digest = self._verify(transfer, sent, target, commit)
            self._channel.tell("verified")
        except TimeoutError as error:
            raise transfer.interrupted(str(error)) from error
        except ConnectionError as error:
            raise transfer.interrupted(self._channel.cause(error)) from error
        return SyncReport(
            version=self._version,
            transport=plan.name,
            num_tensors=len(sent),
            num_bytes=sent.num_bytes,
            sent_bytes=self._num_bytes,
            seconds=time.monotonic() - started,
            digest=digest,
        )

    def _load(self, transfer: TransferState, target: WeightTarget, transport: ReceivingTransport) -> Message:
        """Take buckets until the commit, which is returned. Of those that are announced, as many as the transport has
        `num_ahead` are on their way while another one is loaded."""
        announced: deque[_Announced] = deque()
        num_buckets = 0
        waiting_for = "all rollout workers to be ready"
        while True:
            message = self._channel.next(waiting_for)
            waiting_for = "a bucket or the commit"
            match message:
                case {"kind": "go"}:
                    transport.begin()
                case {"kind": "bucket"}:
                    with self._understood():
                        bucket = _Announced.of(message)
                    transport.expect(bucket.num_bytes, bucket.pieces)
                    announced.append(bucket)
                    self._num_bytes += bucket.arriving_bytes
                case {"kind": "commit"}:
                    pass
                case _:
                    raise SyncCorrupted(
                        f"sync {self._version} corrupted: the sender said {str(message)[:100]}; {REFUSAL}"
                    )
            is_over = message["kind"] == "commit"
            while len(announced) > (0 if is_over else transport.num_ahead):
                self._load_next(transfer, target, num_buckets, announced.popleft(), transport.receive())
                num_buckets += 1
            if is_over:
                transport.finish()
                return message

    def _load_next(
        self, transfer: TransferState, target: WeightTarget, number: int, bucket: _Announced, data: Tensor
    ) -> None:
        """Load a bucket [n] uint8. Nothing keeps it: it is the transport's memory, which may have to be replaced."""
        if bucket.start is not None and len(bucket.entries) == 1:
            self._load_part(transfer, target, number, bucket.entries[0][0], bucket.start, data)
        else:
            self._load_bucket(transfer, target, number, bucket.entries, bucket.changed, data)

    def _load_bucket(
        self, transfer: TransferState, target: WeightTarget, number: int,
        entries: Sequence[tuple[TensorMetadata, int]], changed: Mapping[str, Sequence[ChangedPart]], data: Tensor,
    ) -> None:  # fmt: skip
        """Load whole weights, and the changes of those that are `changed`."""
        whole = [(weight, offset) for weight, offset in entries if weight.name not in changed]
        if loads := transfer.take(number, whole, data):
            target.load(loads)
        changes: list[tuple[str, Changes]] = []
        for weight, _ in entries:
            if weight.name in changed:
                changes += transfer.take_changes(number, weight, changed[weight.name], data)
        if changes:
            assert isinstance(target, ChangesTarget), "changes come to no other"
            target.load_changes(changes)

    def _load_part(
        self, transfer: TransferState, target: WeightTarget, number: int, weight: TensorMetadata, start: int,
        data: Tensor,
    ) -> None:  # fmt: skip
        """Load a part of a weight; a target that takes whole ones gets it when the last part is there."""
        loads = transfer.take_part(number, weight, start, data)
        if loads and isinstance(target, PartTarget):
            for name, first, part in loads:
                target.load_part(name, first, part)
        elif loads:
            if start == 0:
                self._whole = torch.empty(weight.num_bytes, dtype=torch.uint8)
            self._whole[start : start + len(data)].copy_(data)
            if start + len(data) == weight.num_bytes:
                target.load([(name, tensor_at(self._whole, weight, 0)) for name, _, _ in loads])
                self._whole = self._whole.new_empty(0)

    def _verify(
        self, transfer: TransferState, sent: WeightsMetadata, target: WeightTarget, commit: Message
    ) -> str:
        """Read the live parameters again; the digest of all of them."""
        with self._understood():
            expected = {str(name): int(value) for name, value in commit["digests"].items()}
        live = target.digests(transfer.names_to_read())
        transfer.check_digests(live, expected)
        digest = combine_digests(sent, {weight.name: _live(weight, live) for weight in sent})
        if digest != commit["digest"]:
            raise SyncCorrupted(
                f"sync {self._version} corrupted: the digest of all weights is {digest[:12]}…, the sender's "
                f"{str(commit['digest'])[:12]}…; {REFUSAL}"
            )
        return digest

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Check the form of the sender's message."""
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise SyncCorrupted(
                f"sync {self._version} corrupted: the sender's message cannot be read ({error}); {REFUSAL}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class _Announced:
    """A bucket that is to come, as the sender says."""

    num_bytes: int
    entries: Sequence[tuple[TensorMetadata, int]]
    """Each weight with the byte where it starts."""
    start: int | None
    """First byte of the one weight of which it is a part; None: all weights are whole, or changes."""
    changed: Mapping[str, Sequence[ChangedPart]]
    pieces: Sequence[Sequence[Runs]]

    @property
    def arriving_bytes(self) -> int:
        """Bytes that travel: those of the pieces, where there are any."""
        return sum(runs.num_bytes for piece in self.pieces for runs in piece) or self.num_bytes

    @classmethod
    def of(cls, message: Message) -> _Announced:
        """The sender's message; raises ValueError, TypeError for another form."""
        match message:
            case {
                "num_bytes": int(num_bytes),
                "entries": list(entries),
                "start": int() | None as start,
                "changes": dict(changes),
                "pieces": list(pieces),
            }:
                return cls(
                    num_bytes=num_bytes,
                    entries=[(weight_from_json(entry[:-1]), int(entry[-1])) for entry in entries],
                    start=start,
                    changed={str(name): _all(parts, ChangedPart) for name, parts in changes.items()},
                    pieces=[_within(_all(piece, Runs), num_bytes) for piece in pieces],
                )
        raise ValueError(f"not the announcement of a bucket: {str(message)[:100]}")


T = TypeVar("T", Runs, ChangedPart)


def _all(values: Iterable[object], kind: type[T]) -> list[T]:
    return [kind.from_json(value) for value in values]


def _within(piece: list[Runs], num_bytes: int) -> list[Runs]:
    """A piece, every place of which must lie within its bucket."""
    outside = next((runs for runs in piece if runs.stop > num_bytes), None)
    if outside is not None:
        raise ValueError(f"a piece at {outside} of a bucket of {num_bytes} bytes")
    return piece


def _live(weight: TensorMetadata, live: Mapping[str, int]) -> int:
    return next(live[name] for name in weight.names if name in live)
