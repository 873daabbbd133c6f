"""Buckets through a store: a shared folder or an object store that both sides reach, where no fast network joins them.

Each rank of the sender writes its piece of a bucket as files. A receiver that has read a bucket says so on the channel,
and each rank removes its files once all have; so two buckets at most lie in the store, whatever the size of the model.
Buckets may hold changes in place of weights, as over the network.

Every file begins with a keyed digest of its name and content, by the secret of the session: whoever else can write to
the store cannot put weights of his own there. He can read those that pass through.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from strop.rollout.weight_sync.channel import ReceiverChannel, SenderChannel, SenderGaveUp
from strop.rollout.weight_sync.stream import BUCKET_BYTES
from strop.rollout.weight_sync.transport import Pieces, Plan, put_piece
from strop.utils.hub.byte_store import ByteStore

PREFIX = "strop-weights-"
PLAN_NAME = "store"
FILE_BYTES = 32 << 20
"""Largest content of a file: small enough that a slow link carries it within the deadline of a wait."""
NUM_BUCKETS = 2
"""Buckets in the store at a time: the receivers read one while the sender writes the next."""
MAX_HELD_BYTES = 2 * BUCKET_BYTES
"""Most that a receiver holds: a bucket, and the piece of it that it reads; a rank of the sender holds its piece."""
_DIGEST_BYTES = 32
_AGAIN_S = 0.1
"""Between two looks for a file that the store does not show yet."""

logger = logging.getLogger(__name__)


def store_plan(url: str, *, made_in: int) -> Plan:
    """A folder of its own in this one; nothing is made yet."""
    return Plan(name=PLAN_NAME, made_in=made_in, path=f"{url.rstrip('/')}/{PREFIX}{secrets.token_hex(8)}")


class StoreSender:
    """The side of one rank of the sender."""

    def __init__(
        self, plan: Plan, *, rank: int, secret: str, timeout_s: float, channel: SenderChannel | None = None
    ) -> None:
        """Nothing is opened yet.

        Args:
            plan: as rank 0 has made it.
            rank: of the sender.
            secret: of the session.
            timeout_s: limit of each call of the store, in seconds.
            channel: to the receivers, on rank 0.
        """
        self.plan = plan
        self._rank, self._secret, self._timeout_s, self._channel = rank, secret, timeout_s, channel
        self._store: ByteStore | None = None
        self._bucket = self._begun = 0
        """Number of the next bucket, and of the first one of this sync."""
        self._files: deque[tuple[int, str]] = deque()
        """Files in the store, each behind the number of its bucket."""

    @property
    def max_bucket_bytes(self) -> int:
        """As large as the sender likes: a bucket is a number of files."""
        return BUCKET_BYTES

    def begin(self) -> None:
        """Open the store. All receivers have read what is left there of the sync before."""
        if self._store is None:
            self._store = ByteStore(self.plan.path, timeout_s=self._timeout_s)
        self._begun = self._bucket
        self._remove_before(self._begun)

    @property
    def needs_room(self) -> bool:
        """Yes: files of a bucket replace those of an earlier one."""
        return True

    def wait_for_room(self) -> None:
        """On rank 0: wait until the receivers have read the bucket whose files the next one replaces."""
        before = self._bucket - NUM_BUCKETS
        if before >= self._begun:
            assert self._channel is not None, "rank 0 has the channel"
            self._channel.hear("read", before, f"to read bucket {before} of the store")

    def send(self, contents: Sequence[Tensor]) -> None:
        """Write a piece file by file."""
        assert self._store is not None, "a sync has begun"
        self._remove_before(self._bucket - NUM_BUCKETS + 1)
        data = torch.cat([content.cpu() for content in contents]) if contents else None
        for number, part in enumerate(() if data is None else torch.split(data, FILE_BYTES)):
            name, content = _name(self._bucket, self._rank, number), part.numpy().tobytes()
            self._files.append((self._bucket, name))
            self._store.put(name, _digest(self.plan, name, content, self._secret) + content)
        self._bucket += 1

    def finish(self) -> None:
        """Nothing to do: the last files lie in the store until the next sync."""

    def close(self) -> None:
        """On rank 0 remove the folder with the files of all ranks, which have no use for it any more."""
        if self._store is None:
            return
        try:
            if self._channel is not None:
                self._store.remove_all()
        except (ConnectionError, TimeoutError) as error:
            logger.warning("%s stays, because it cannot be removed: %s", self.plan.path, error)
        self._store = None

    def _remove_before(self, bucket: int) -> None:
        """Remove the files of earlier buckets."""
        assert self._store is not None, "a sync has begun"
        while self._files and self._files[0][0] < bucket:
            self._store.remove(self._files.popleft()[1])


class StoreReceiver:
    """The side of one receiver."""

    def __init__(self, channel: ReceiverChannel, plan: Plan) -> None:
        """Raises ConnectionError, TimeoutError: this process cannot use the store."""
        self.plan = plan
        self._channel = channel
        self._store = ByteStore(plan.path, timeout_s=channel.timeout_s)
        self._bucket = self._num_bytes = 0
        self._pieces: Pieces = ()

    @property
    def num_ahead(self) -> int:
        """None: the sender waits until a bucket was read."""
        return 0

    def begin(self) -> None:
        """Nothing to do."""

    def expect(self, num_bytes: int, pieces: Pieces) -> None:
        """Nothing to do before it is read."""
        self._num_bytes, self._pieces = num_bytes, pieces

    def receive(self) -> Tensor:
        """Read a bucket file by file, into memory that is nobody else's."""
        data = torch.empty(self._num_bytes, dtype=torch.uint8)
        for rank, places in enumerate(self._pieces):
            content = torch.empty(sum(runs.num_bytes for runs in places), dtype=torch.uint8)
            self._read_piece(rank, content)
            put_piece(places, content, data)
        self._channel.tell("read", number=self._bucket)
        self._bucket += 1
        return data

    def finish(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do: the folder is the sender's."""

    def _read_piece(self, rank: int, data: Tensor) -> None:
        """Read what a rank gives [n] uint8."""
        for number, part in enumerate(torch.split(data, FILE_BYTES) if len(data) else ()):
            content = self._read(_name(self._bucket, rank, number), len(part))
            part.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def _read(self, name: str, size: int) -> bytes:
        """Content of a file, once the store shows all of it."""
        deadline = time.monotonic() + self._channel.timeout_s
        whole = _DIGEST_BYTES + size
        while True:
            content = self._store.get(name, max_bytes=whole + 1)
            if content is not None and len(content) == whole:
                break
            there = "nothing" if content is None else "one of another size"
            place = (
                f"file {name} of {whole} bytes in {self.plan.path}, where there is {there}; both sides must see the "
                f"same store"
            )
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {self._channel.timeout_s:g} s for {place}")
            try:
                self._channel.check()  # what another receiver failed to read is removed
            except SenderGaveUp as error:
                raise SenderGaveUp(f"{error}, while this one waited for {place}") from error
            time.sleep(_AGAIN_S)
        expected = _digest(self.plan, name, content[_DIGEST_BYTES:], self._channel.session)
        if not hmac.compare_digest(content[:_DIGEST_BYTES], expected):
            raise ConnectionError(f"file {name} in {self.plan.path} is not what the sender wrote")
        return content[_DIGEST_BYTES:]


def _name(bucket: int, rank: int, number: int) -> str:
    return f"{bucket}-{rank}-{number}"


def _digest(plan: Plan, name: str, content: bytes, secret: str) -> bytes:
    """Of a file, by who knows the secret; another session, place or bucket has another one."""
    key = hashlib.blake2b(f"{secret} {plan.path} {name}".encode()).digest()
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=key).digest()
