"""The side of a rollout worker: weights arrive, are loaded into the live parameters and verified there.

Concurrency: `receive` is called while the sender calls `send`, from one thread; nothing may generate meanwhile
(verified_engine.py sees to it). Each `send` of the sender has one `receive` or `refuse` of every receiver. Every wait
has a deadline; the messages are listed in sender.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from strop.engines.checksum.models import combine_digests
from strop.engines.weight_parts import Runs
from strop.engines.weights import TensorMetadata, WeightsMetadata
from strop.rollout.weight_sync import device_slots, shared_memory, store_transport
from strop.rollout.weight_sync.accounting import TransferState
from strop.rollout.weight_sync.channel import ReceiverChannel
from strop.rollout.weight_sync.collective import CollectiveReceiver
from strop.rollout.weight_sync.cuda_ipc import DeviceOf, SharingDevice, sharing_device
from strop.rollout.weight_sync.delta import ChangedPart, Changes
from strop.rollout.weight_sync.device_slots import OpenedSlots
from strop.rollout.weight_sync.host_copy import HostCopy
from strop.rollout.weight_sync.sender import TIMEOUT_S
from strop.rollout.weight_sync.shared_memory import opened_file_slots, shares_memory
from strop.rollout.weight_sync.slots import SlotReceiver
from strop.rollout.weight_sync.store_transport import StoreReceiver
from strop.rollout.weight_sync.stream import tensor_at, weight_from_json, weights_from_json
from strop.rollout.weight_sync.target import ChangesTarget, PartTarget, WeightTarget
from strop.rollout.weight_sync.transport import Plan, ReceivingTransport
from strop.rollout.weight_sync.types import (
    REFUSAL,
    Endpoint,
    SyncCorrupted,
    SyncIncomplete,
    SyncRefused,
    SyncReport,
    UnverifiedWeights,
)
from strop.utils.json_messages import Message


class WeightReceiver:
    """Keeps one engine's parameters at the versions that a sender sends, and knows whether they are verified."""

    def __init__(
        self,
        target: WeightTarget,
        *,
        device: str = "cpu",
        timeout_s: float = TIMEOUT_S,
        device_of: DeviceOf = sharing_device,
    ) -> None:
        """Nothing is connected, and nothing is verified, yet.

        Args:
            target: the engine's parameters.
            device: device they are on.
            timeout_s: limit of each wait for the sender, in seconds.
            device_of: gives the calls that share memory of this device.
        """
        self._target = target
        self._copy = HostCopy(target)
        """Of a target that takes whole tensors, while weights come over the network."""
        self._device = torch.device(device)
        self._sharing = device_of(self._device)
        self._timeout_s = timeout_s
        self._connection: _Connection | None = None
        self._version: int | None = None
        self._begun: int | None = None
        self._digest = ""
        """Of the verified version."""
        self._reason = "no weights have arrived yet"

    @property
    def version(self) -> int | None:
        """The verified version that the parameters hold; None while there is none."""
        return self._version

    def require_verified(self, requester: str) -> int:
        """The verified version.

        Args:
            requester: what needs them, for the error.

        Raises:
            UnverifiedWeights: there is none; the message says why.
        """
        if self._version is None:
            raise UnverifiedWeights(f"{requester} is refused, the weights are not verified: {self._reason}")
        return self._version

    def join(self, endpoint: Endpoint, *, index: int) -> None:
        """Connect with a sender as its receiver number `index`, also in the place of one that is gone.

        Raises:
            ValueError: the sender expects fewer receivers.
            ConnectionError: nobody listens there.
        """
        if not 0 <= index < endpoint.num_receivers:
            raise ValueError(
                f"rollout worker {index} joins a weight sync of {endpoint.num_receivers}, counted from 0"
            )
        self.close()
        self._connection = _Connection(
            endpoint, index, device=self._device.type, sharing=self._sharing, timeout_s=self._timeout_s
        )

    def receive(self, version: int) -> SyncReport:
        """Take part in the sync to this version; the parameters hold it, verified, when this returns.

        Raises:
            SyncIncomplete, SyncCorrupted, SyncRefused: the parameters are not verified, and generation is refused
                until a later sync succeeds. A sync that never began, or in the wrong order, leaves the version
                before it in force.
            ValueError: no sender was joined.
        """
        connection = self._joined()
        started = time.monotonic()
        begin = connection.wait_for(version)
        try:
            self._check_order(begin, version)
            holds_base = self._version is not None and begin.get("base") == self._digest
            holds_base &= isinstance(self._target, ChangesTarget) or self._copy.is_complete
            self._version, self._begun = None, version
            self._reason = f"sync {version} is under way"
            sync = _IncomingSync(connection, begin, version, holds_base=holds_base)
            report = sync.run(self._target, self._copy, started)
        except BaseException as error:
            reason = str(error) or type(error).__name__
            self._reason = reason if self._version is None else self._reason
            connection.give_up(reason)
            raise
        self._version, self._digest = version, report.digest
        return report

    def refuse(self, version: int, reason: str) -> NoReturn:
        """Take part in the sync to this version by refusing it, so that nobody waits for this receiver.

        Raises:
            SyncRefused: always; what the parameters hold stays in force.
            SyncIncomplete: the sync did not begin.
            ValueError: no sender was joined.
        """
        connection = self._joined()
        connection.wait_for(version)
        error = SyncRefused(f"sync {version} refused: {reason}")
        connection.give_up(str(error))
        raise error

    def close(self) -> None:
        """Leave the sender; what is verified stays so. Harmless when nothing was joined."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _joined(self) -> _Connection:
        if self._connection is None:
            raise ValueError("the rollout worker has not joined a weight sync; call join(endpoint) first")
        return self._connection

    def _check_order(self, begin: Message, version: int) -> None:
        announced = begin["version"]
        if announced != version:
            raise SyncRefused(f"sync {announced} refused: the rollout worker expects version {version}")
        if self._begun is not None and version < self._begun:
            raise SyncRefused(
                f"sync {version} refused: it goes backwards, the rollout worker has begun sync {self._begun}; versions "
                f"only grow"
            )


class _Connection:
    """Channel and transport, which outlive a sync."""

    def __init__(
        self, endpoint: Endpoint, index: int, *, device: str, sharing: SharingDevice | None, timeout_s: float
    ) -> None:
        self._session = endpoint.session
        self._sharing = sharing
        self._index = index
        shares = bool(endpoint.memory) and shares_memory(Path(endpoint.memory), endpoint.session)
        self.channel = ReceiverChannel(
            endpoint, index=index, timeout_s=timeout_s, device=device, shares_memory=shares,
            shares_device=sharing is not None,
        )  # fmt: skip
        self._transport: ReceivingTransport | None = None

    def wait_for(self, version: int) -> Message:
        """The next `begin`; memory of the sender's device that is offered before is opened.

        Raises:
            SyncIncomplete: none came within the deadline, the sender is gone, or it has given up this version before
                this receiver heard of it. Nothing was overwritten.
        """
        try:
            message = self.channel.next_begin(version)
            if message["kind"] == "offer":
                self._open(Plan(**message["plan"]))
                message = self.channel.next(f"sync {version} to begin after an offer of memory")
            return message
        except (TimeoutError, ConnectionError) as error:
            raise SyncIncomplete(f"sync {version} did not begin: {error}") from error

    def transport(self, plan: Plan) -> ReceivingTransport:
        """The transport that the sender uses: the one of the sync before, or another."""
        if self._transport is None or self._transport.plan != plan:
            self._drop_transport()
            if plan.name == shared_memory.PLAN_NAME:
                slots = opened_file_slots(plan, session=self._session)
                self._transport = SlotReceiver(self.channel, slots, plan)
            elif plan.name == store_transport.PLAN_NAME:
                self._transport = StoreReceiver(self.channel, plan)
            else:
                self._transport = CollectiveReceiver(self.channel, plan, index=self._index)
        return self._transport

    def _open(self, plan: Plan) -> None:
        """Open memory of the sender's device, and tell it whether that succeeded."""
        self._drop_transport()
        try:
            self._transport = SlotReceiver(self.channel, OpenedSlots(self._sharing, plan), plan)
        except OSError as error:
            self.channel.tell("opened", number=0, reason=str(error))
        else:
            self.channel.tell("opened", number=1)

    def give_up(self, reason: str) -> None:
        """Tell the sender why, and start afresh next time."""
        with suppress(ConnectionError):
            self.channel.tell("failed", reason=reason)
        self._drop_transport()

    def close(self) -> None:
        """End the session on this side."""
        self._drop_transport()
        self.channel.close()

    def _drop_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


class _IncomingSync:
    """One sync, from its begin to the verdict."""

    def __init__(self, connection: _Connection, begin: Message, version: int, *, holds_base: bool) -> None:
        self._connection = connection
        self._holds_base = holds_base
        self._channel = connection.channel
        self._begin = begin
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
            transport = self._connection.transport(plan)
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
        """Take buckets until the commit, which is returned."""
        num_buckets = 0
        waiting_for = "all rollout workers to be ready"
        while True:
            message = self._channel.next(waiting_for)
            waiting_for = "a bucket or the commit"
            match message:
                case {"kind": "go"}:
                    transport.begin()
                case {
                    "kind": "bucket",
                    "num_bytes": int(num_bytes),
                    "entries": list(entries),
                    "start": start,
                    "changes": dict(changes),
                    "pieces": list(pieces),
                }:
                    with self._understood():
                        arriving = [(weight_from_json(entry[:-1]), int(entry[-1])) for entry in entries]
                        changed = {str(name): _all(parts, ChangedPart) for name, parts in changes.items()}
                        places = [_within(_all(piece, Runs), num_bytes) for piece in pieces]
                    data = transport.receive(num_bytes, places)
                    self._num_bytes += num_bytes
                    if start is not None and len(arriving) == 1:
                        self._load_part(transfer, target, num_buckets, arriving[0][0], int(start), data)
                    else:
                        self._load_bucket(transfer, target, num_buckets, arriving, changed, data)
                    del data  # the transport's memory, which it may have to replace
                    num_buckets += 1
                case {"kind": "commit"}:
                    transport.finish()
                    return message
                case _:
                    raise SyncCorrupted(
                        f"sync {self._version} corrupted: the sender said {str(message)[:100]}; {REFUSAL}"
                    )

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
