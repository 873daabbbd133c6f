"""Buckets through two slots of memory that the processes of a node share.

The ranks of the sender fill one slot together, each with its part of the weights, while the receivers read the other. A
bucket is announced on the channel when it lies in its slot, which is filled again when every receiver has said there
that it is done with it. Where copies run behind the program, as on a device, each side waits for its own before it says
so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from strop.rollout.weight_sync.channel import ReceiverChannel, SenderChannel
from strop.rollout.weight_sync.transport import Pieces, Plan

NUM_SLOTS = 2


class SlotMemory(Protocol):
    """The two slots, as one process sees them."""

    @property
    def slots(self) -> Sequence[Tensor]:
        """[slot_bytes] uint8 each."""
        ...

    def settle(self) -> None:
        """Wait until the copies into them and out of them that this process has started are done."""
        ...

    def all_have_it(self) -> None:
        """Every process that takes part has opened it."""
        ...

    def close(self) -> None:
        """Give it back; harmless the second time."""
        ...


class SlotSender:
    """The sender's side."""

    def __init__(self, channel: SenderChannel, memory: SlotMemory, plan: Plan) -> None:
        self.plan = plan
        self._channel = channel
        self._memory = memory
        self._piece = 0

    def begin(self) -> None:
        """Start at the first slot; all receivers are ready."""
        self._memory.all_have_it()
        self._piece = 0

    def room(self, num_bytes: int) -> Tensor:
        """Memory [n] uint8 of the next bucket, once every receiver is done with what lay there.

        Raises:
            ConnectionError, TimeoutError, ReceiverFailed: as of the channel.
        """
        if self._piece >= NUM_SLOTS:
            before = self._piece - NUM_SLOTS
            self._channel.hear("read", before, f"to read piece {before} of the shared memory")
        return self._memory.slots[self._piece % NUM_SLOTS][:num_bytes]

    def settle(self) -> None:
        """Wait until what this process has put into the `room` is there."""
        self._memory.settle()

    def send(self, data: Tensor) -> None:
        """Hand on the bucket [n] uint8 that was put into the `room`."""
        expected = self._memory.slots[self._piece % NUM_SLOTS].data_ptr()
        assert data.data_ptr() == expected, "it lies where there was room"
        self._piece += 1

    def finish(self) -> None:
        """Nothing to do: the last pieces lie in the slots until the receivers have answered the commit."""

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class SlotHelper:
    """The side of another rank of the sender, which helps to fill the slots."""

    def __init__(self, memory: SlotMemory, plan: Plan) -> None:
        self.plan = plan
        self._memory = memory
        self._piece = 0

    def begin(self) -> None:
        """Start at the first slot."""
        self._piece = 0

    def room(self, num_bytes: int) -> Tensor:
        """Memory [n] uint8 of the next bucket, which rank 0 has found free."""
        self._piece += 1
        return self._memory.slots[(self._piece - 1) % NUM_SLOTS][:num_bytes]

    def settle(self) -> None:
        """Wait until what this process has put into the `room` is there."""
        self._memory.settle()

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class SlotReceiver:
    """The side of one receiver."""

    def __init__(self, channel: ReceiverChannel, memory: SlotMemory, plan: Plan) -> None:
        self.plan = plan
        self._channel = channel
        self._memory = memory
        self._piece = self._num_bytes = 0
        self._in_use: int | None = None

    @property
    def num_ahead(self) -> int:
        """None: a bucket is there when it is announced, and the slot of the one before is wanted."""
        return 0

    def begin(self) -> None:
        """Start at the first slot."""
        self._piece, self._in_use = 0, None

    def expect(self, num_bytes: int, pieces: Pieces) -> None:
        """It is there: all pieces lie in the slot."""
        self._num_bytes = num_bytes

    def receive(self) -> Tensor:
        """The slot itself."""
        self.finish()
        slot = self._memory.slots[self._piece % NUM_SLOTS]
        self._in_use = self._piece
        self._piece += 1
        return slot[: self._num_bytes]

    def finish(self) -> None:
        """Tell the sender that the last piece was read."""
        if self._in_use is not None:
            self._memory.settle()
            self._channel.tell("read", number=self._in_use)
            self._in_use = None

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
