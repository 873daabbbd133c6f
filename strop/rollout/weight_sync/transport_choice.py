"""Choice of the transport of a sync: memory that both sides share where they are on one node, else the network.

    store           where one is set
    cuda_ipc        the weights and all receivers are on devices of this node, which open each other's memory
    shared_memory   all ranks of the actor and all receivers are on one node
    collective      else

Memory of the device is offered to the receivers before the sync begins. Where one of them, or a rank of the actor,
cannot open it, a warning says why, once, and this session does not try again.

Concurrency: `choose` is called by rank 0 while the other ranks of the actor are in `Outgoing.help` and the receivers
wait for a sync to begin.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from strop.engines.weights import WeightsMetadata
from strop.rollout.weight_sync import collective, device_slots, shared_memory, store_transport
from strop.rollout.weight_sync.broadcast_group import common_device
from strop.rollout.weight_sync.channel import SenderChannel
from strop.rollout.weight_sync.collective import CollectiveSender, collective_sender
from strop.rollout.weight_sync.cuda_ipc import SharingDevice
from strop.rollout.weight_sync.device_slots import OwnedSlots
from strop.rollout.weight_sync.outgoing import Outgoing
from strop.rollout.weight_sync.shared_memory import SharedFile, file_slots
from strop.rollout.weight_sync.slots import NUM_SLOTS, SlotSender
from strop.rollout.weight_sync.store_transport import StoreSender, store_plan
from strop.rollout.weight_sync.stream import ALIGNMENT, BUCKET_BYTES
from strop.rollout.weight_sync.transport import Plan
from strop.utils.json_messages import Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BucketMemory:
    """Most bytes that buckets of a sync take of a rank of the actor, or of a receiver."""

    device: int
    """Of an accelerator."""
    host: int


def bucket_memory(device: str, *, store: str, num_nodes: int) -> BucketMemory:
    """Memory by the transport that `TransportChoice` comes to.

    Args:
        device: type of the device of both sides.
        store: as of `TransportChoice`.
        num_nodes: on which both sides are.
    """
    is_cpu = device == "cpu"
    if store:
        held = store_transport.MAX_HELD_BYTES  # a rank casts and joins its piece where the weights are
        return BucketMemory(device=0 if is_cpu else held, host=held)
    if num_nodes > 1:
        held = collective.max_held_bytes(torch.device(device))
        return BucketMemory(device=0 if is_cpu else held, host=held if is_cpu else 0)
    # Devices that cannot open each other's memory take the host's.
    return BucketMemory(
        device=0 if is_cpu else NUM_SLOTS * BUCKET_BYTES, host=NUM_SLOTS * shared_memory.SLOT_BYTES
    )


class TransportChoice:
    """The transport of a session, which outlives a sync unless it fails or somebody joins."""

    def __init__(self, channel: SenderChannel, *, bucket_bytes: int, device: str, store: str) -> None:
        """Args:
        channel: to the receivers.
        bucket_bytes: limit of a slot.
        device: type of the device the weights are on, for the network.
        store: folder or URL through which all syncs go; "" for none.
        """
        self._channel = channel
        self._bucket_bytes, self._device, self._store = bucket_bytes, device, store
        self._transport: SlotSender | CollectiveSender | StoreSender | None = None
        self._num_joins = 0
        self._uses_device = True
        self._file = None if store else self._make_file()

    @property
    def uses_store(self) -> bool:
        """All syncs go through a store."""
        return bool(self._store)

    @property
    def memory_path(self) -> str:
        """File by which a receiver finds out whether it is on this node; "" for none."""
        return "" if self._file is None else str(self._file.path)

    def choose(
        self, version: int, attempt: int, outgoing: Outgoing, *, joined: list[Message], device: SharingDevice | None
    ) -> SlotSender | CollectiveSender | StoreSender:  # fmt: skip
        """The transport of this attempt; the other ranks of the actor know of it.

        Args:
            version, attempt: of the sync.
            outgoing: the weights.
            joined: greetings of the receivers.
            device: of the weights, if its memory can be shared.

        Raises:
            ConnectionError, TimeoutError, ReceiverFailed: as of the channel.
        """
        if self._num_joins != self._channel.num_joins:
            self.drop()
            self._num_joins = self._channel.num_joins
        if self._transport is None and not self._store and _all_say(joined, "shares_memory"):
            metadata = outgoing.metadata
            if self._uses_device and device is not None and _all_say(joined, "shares_device"):
                self._transport = self._over_device(version, attempt, metadata, device)
            if self._transport is None:
                self._transport = self._over_memory(attempt, metadata)
        self._remove_file()  # of no use to a transport that is not there now
        if isinstance(self._transport, SlotSender):
            self._agree(attempt, outgoing, self._transport)
        if self._transport is None:
            self._transport = self._in_pieces(attempt, outgoing, joined)
        if not isinstance(self._transport, SlotSender):
            outgoing.begin_pieces(self._transport.plan, self._channel)
        return self._transport

    def drop(self) -> None:
        """Close the transport, if there is one."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def close(self) -> None:
        """Give everything back."""
        self.drop()
        self._remove_file()

    def _agree(self, attempt: int, outgoing: Outgoing, first: SlotSender) -> None:
        """Let all ranks of the actor open the slots; where one cannot, use others, or none."""
        transport: SlotSender | None = first
        while transport is not None:
            failed = outgoing.begin_shards(transport.plan, self._channel.session)
            if not failed:
                return
            self.drop()
            if transport.plan.name == device_slots.PLAN_NAME:
                self._refuse_device(f"rank {failed[0]} of the actor cannot open it; its log says why")
                self._transport = transport = self._over_memory(attempt, outgoing.metadata)
            else:
                transport = None  # a rank is on another node

    def _over_device(
        self, version: int, attempt: int, metadata: WeightsMetadata, device: SharingDevice
    ) -> SlotSender | None:
        """Memory of the device, if there is room and every receiver opens it."""
        slot_bytes = _slot_bytes(metadata, self._bucket_bytes)
        try:
            slots = OwnedSlots(device, slot_bytes)
        except OSError as error:
            self._refuse_device(str(error))
            return None
        plan = Plan(
            name=device_slots.PLAN_NAME, made_in=attempt, memory=slots.exported, slot_bytes=slot_bytes
        )
        try:
            self._channel.tell("offer", version=version, plan=plan.to_json())
            self._channel.hear("opened", 1, "to open memory of the device", also=0)
        except BaseException:
            slots.close()
            raise
        if self._channel.say_so("opened", 1):
            return SlotSender(self._channel, slots, plan)
        slots.close()
        self._refuse_device(self._channel.reason("opened", 0))
        return None

    def _refuse_device(self, reason: str) -> None:
        self._uses_device = False
        logger.warning("the weights go through host memory, not through memory of the device: %s", reason)

    def _over_memory(self, attempt: int, metadata: WeightsMetadata) -> SlotSender | None:
        """Shared memory of the node, if there is room."""
        file, self._file = self._file or self._make_file(), None
        if file is None:
            return None
        slot_bytes = _slot_bytes(metadata, min(self._bucket_bytes, shared_memory.SLOT_BYTES))
        plan = Plan(name=shared_memory.PLAN_NAME, made_in=attempt, path=str(file.path), slot_bytes=slot_bytes)
        try:
            return SlotSender(self._channel, file_slots(file, slot_bytes), plan)
        except OSError as error:
            file.remove()
            logger.warning(
                "%s has no room for two buckets of %d bytes (%s); the weights go over the network instead: enlarge "
                "it or make the buckets smaller",
                shared_memory.FOLDER,
                slot_bytes,
                error,
            )
            return None

    def _in_pieces(
        self, attempt: int, outgoing: Outgoing, joined: list[Message]
    ) -> CollectiveSender | StoreSender:
        """The store, or the network."""
        channel = self._channel
        if self._store:
            return StoreSender(
                store_plan(self._store, made_in=attempt), rank=0, secret=channel.session, timeout_s=channel.timeout_s,
                channel=channel,
            )  # fmt: skip
        device = common_device([self._device, *(str(answer.get("device")) for answer in joined)])
        return collective_sender(channel, made_in=attempt, device=device, num_senders=outgoing.ranks.size)

    def _make_file(self) -> SharedFile | None:
        try:
            return SharedFile(shared_memory.FOLDER, self._channel.session)
        except OSError as error:
            logger.info("no shared memory for the weight sync (%s)", error)
            return None

    def _remove_file(self) -> None:
        if self._file is not None:
            self._file.remove()
            self._file = None


def _all_say(joined: list[Message], fact: str) -> bool:
    return all(answer.get(fact) is True for answer in joined)


def _slot_bytes(metadata: WeightsMetadata, limit: int) -> int:
    """Size of a slot. A small model needs no large ones: they are taken from the node's memory."""
    needed = metadata.num_bytes + ALIGNMENT * len(metadata)
    return max(1, min(limit, needed) // ALIGNMENT) * ALIGNMENT
