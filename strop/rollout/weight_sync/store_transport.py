"""Buckets through a store: a shared folder or an object store that both sides reach, where no fast network joins them.

A bucket is written as pieces. Of each the channel says the digest once it is there; a piece is removed when every
receiver has said that it has read it, so that few lie in the store whatever the size of the model. Buckets may hold
changes in place of weights, as over the network.

What a receiver reads is compared with a cryptographic digest that came over the channel: whoever else can write to the
store cannot put weights of his own there. He can read those that pass through.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections import deque

import torch
from torch import Tensor

from strop.rollout.weight_sync.channel import ReceiverChannel, SenderChannel, SenderGaveUp
from strop.rollout.weight_sync.transport import Plan
from strop.utils.hub.byte_store import ByteStore

PREFIX = "strop-weights-"
PIECE_BYTES = 32 << 20
"""Largest file: small enough that a slow link carries it within the deadline of a wait."""
MAX_PIECES = 4
"""Pieces in the store at a time: a receiver reads some while the sender writes the next."""
_AGAIN_S = 0.1
"""Between two looks for a piece that a shared folder does not show yet."""

logger = logging.getLogger(__name__)


class StoreSender:
    """The sender's side."""

    def __init__(self, channel: SenderChannel, url: str, *, made_in: int) -> None:
        """Choose a folder of its own in this one; nothing is made yet."""
        path = f"{url.rstrip('/')}/{PREFIX}{secrets.token_hex(8)}"
        self.plan = Plan(name="store", made_in=made_in, path=path)
        self._channel = channel
        self._store: ByteStore | None = None
        self._number = 0
        self._left: deque[int] = deque()
        """Pieces in the store."""

    def begin(self) -> None:
        """Open the store. All receivers have read what is left there of the sync before."""
        if self._store is None:
            self._store = ByteStore(self.plan.path, timeout_s=self._channel.timeout_s)
        self._remove_but(0)

    def send(self, data: Tensor) -> None:
        """Write a bucket piece by piece."""
        assert self._store is not None, "a sync has begun"
        for part in torch.split(data.cpu(), PIECE_BYTES) if len(data) else ():
            while len(self._left) >= MAX_PIECES:
                self._channel.hear("read", self._left[0], f"to read piece {self._left[0]} of the store")
                self._remove_but(MAX_PIECES - 1)
            content = part.numpy().tobytes()
            self._store.put(str(self._number), content)
            self._left.append(self._number)
            self._channel.tell("piece", number=self._number, num_bytes=len(content), digest=_digest(content))
            self._number += 1

    def finish(self) -> None:
        """Nothing to do: the last pieces lie in the store until the next sync."""

    def close(self) -> None:
        """Remove the folder."""
        if self._store is None:
            return
        try:
            self._store.remove_all()
        except (ConnectionError, TimeoutError) as error:
            logger.warning("%s stays, because it cannot be removed: %s", self.plan.path, error)

    def _remove_but(self, count: int) -> None:
        """Remove the oldest pieces until so many are left."""
        assert self._store is not None, "a sync has begun"
        while len(self._left) > count:
            self._store.remove(str(self._left.popleft()))


class StoreReceiver:
    """The side of one receiver."""

    def __init__(self, channel: ReceiverChannel, plan: Plan) -> None:
        """Raises ConnectionError, TimeoutError: this process cannot use the store."""
        self.plan = plan
        self._channel = channel
        self._store = ByteStore(plan.path, timeout_s=channel.timeout_s)

    def begin(self) -> None:
        """Nothing to do."""

    def receive(self, num_bytes: int) -> Tensor:
        """Read a bucket piece by piece, into memory that is nobody else's."""
        data = torch.empty(num_bytes, dtype=torch.uint8)
        start = 0
        while start < num_bytes:
            message = self._channel.next("a piece of a bucket in the store")
            match message:
                case {"kind": "piece", "number": int(number), "num_bytes": int(size), "digest": str(digest)}:
                    pass
                case _:
                    raise ConnectionError(f"the sender said {str(message)[:100]} in the middle of a bucket")
            if not 0 < size <= num_bytes - start:
                raise ConnectionError(f"piece {number} has {size} bytes, and {num_bytes - start} are missing")
            content = self._read(number, size, digest)
            data[start : start + size].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            self._channel.tell("read", number=number)
            start += size
        return data

    def finish(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do: the folder is the sender's."""

    def _read(self, number: int, size: int, digest: str) -> bytes:
        """A piece, once the store shows all of it."""
        deadline = time.monotonic() + self._channel.timeout_s
        while True:
            content = self._store.get(str(number), max_bytes=size + 1)
            if content is not None and len(content) == size:
                break
            there = "nothing" if content is None else "one of another size"
            place = (
                f"piece {number} of {size} bytes in {self.plan.path}, where there is {there}; both sides must see the "
                f"same store"
            )
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {self._channel.timeout_s:g} s for {place}")
            try:
                self._channel.check()  # what another receiver failed to read is removed
            except SenderGaveUp as error:
                raise SenderGaveUp(f"{error}, while this one waited for {place}") from error
            time.sleep(_AGAIN_S)
        if _digest(content) != digest:
            raise ConnectionError(f"piece {number} in {self.plan.path} is not what the sender wrote")
        return content


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()
