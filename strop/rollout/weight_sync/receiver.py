"""The side of a rollout worker: weights arrive, are loaded into the live parameters and verified there.

Concurrency: `receive` is called while the sender calls `send`, from one thread; nothing may generate meanwhile
(verified_engine.py sees to it). Each `send` of the sender has one `receive` or `refuse` of every receiver. Every wait
has a deadline; the messages are listed in sender.py.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

from strop.rollout.weight_sync import shared_memory, store_transport
from strop.rollout.weight_sync.channel import ReceiverChannel
from strop.rollout.weight_sync.collective import CollectiveReceiver
from strop.rollout.weight_sync.cuda_ipc import DeviceOf, SharingDevice, sharing_device
from strop.rollout.weight_sync.device_slots import OpenedSlots
from strop.rollout.weight_sync.host_copy import HostCopy
from strop.rollout.weight_sync.incoming import IncomingSync
from strop.rollout.weight_sync.sender import TIMEOUT_S
from strop.rollout.weight_sync.shared_memory import opened_file_slots, shares_memory
from strop.rollout.weight_sync.slots import SlotReceiver
from strop.rollout.weight_sync.store_transport import StoreReceiver
from strop.rollout.weight_sync.target import ChangesTarget, WeightTarget
from strop.rollout.weight_sync.transport import Plan, ReceivingTransport
from strop.rollout.weight_sync.types import (
    Endpoint,
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
            sync = IncomingSync(
                connection.channel, connection.transport, begin, version, holds_base=holds_base
            )
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
