"""The side of the actor: weights leave its shards and go to all rollout workers at once.

Concurrency: all ranks of the actor call `send` in the same order; rank 0 talks to the receivers, the others take part
in the gathers. The receivers call `receive` at the same time. Whatever goes wrong on the way, rank 0 goes through
the rest of the gathers before it raises, so the actor's ranks stay in step and a sync can be tried again.

    message     from       says
    begin       sender     version, metadata, transport
    ready       receiver   the metadata fit and the transport is there
    go          sender     every receiver is ready
    bucket      sender     which weights the next bytes are
    piece, read both       of shared memory: a slot is full, a slot is free
    commit      sender     the digest of every weight
    verified    receiver   the live parameters have these digests
    failed      receiver   instead of any of its answers: why not
    abort       sender     nothing more of this attempt comes, and why
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn

from strop.engines.checksum.models import combine_digests
from strop.engines.checksum.tensors import finish, word_sum
from strop.engines.weights import WeightsMetadata, weights_metadata
from strop.rollout.weight_sync import shared_memory
from strop.rollout.weight_sync.channel import ReceiverFailed, SenderChannel
from strop.rollout.weight_sync.collective import CollectiveSender, common_device
from strop.rollout.weight_sync.shared_memory import SharedFile, SharedMemorySender
from strop.rollout.weight_sync.stream import ALIGNMENT, BUCKET_BYTES, Bucket, parameter_stream, weight_as_json
from strop.rollout.weight_sync.transport import SendingTransport
from strop.rollout.weight_sync.types import Endpoint, SyncError, SyncReport
from strop.utils.json_messages import Message

TIMEOUT_S = 120.0
"""Limit of one wait for the other side: a step of the protocol, never a whole sync."""

logger = logging.getLogger(__name__)


class WeightSender:
    """Sends the weights of one model, of which this process holds all or a shard."""

    def __init__(
        self,
        module: nn.Module,
        *,
        rank: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Nothing is opened yet.

        Args:
            module: the model, plain or sharded over ranks that all have a sender.
            rank: place of this process among them; 0 talks to the receivers.
            bucket_bytes: memory of a bucket; two of them are in use at a time.
            dtype: what floating-point weights are sent in; the dtype they are held in by default.
            timeout_s: limit of each wait for the receivers, in seconds.
        """
        self._module = module
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._session: _Session | None = None

    def open(self, *, num_receivers: int, host: str = "127.0.0.1") -> Endpoint | None:
        """Rank 0 listens for the receivers, on this address of its node only; other ranks have no endpoint.

        Raises:
            ValueError: no receivers, or an address of another machine.
        """
        if num_receivers < 1:
            raise ValueError(f"a weight sync to {num_receivers} rollout workers; at least 1 is needed")
        self.close()
        if self._rank != 0:
            return None
        channel = SenderChannel(host, num_receivers=num_receivers, timeout_s=self._timeout_s)
        device = next(self._module.parameters()).device.type
        self._session = _Session(channel, bucket_bytes=self._bucket_bytes, device=device)
        return self._session.endpoint

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> SyncReport:
        """Bring all receivers to this version; returns when each has verified what it holds.

        Args:
            version: policy version of the weights; it never goes backwards.
            weights: what to send instead of the module's own tensors (stream.parameter_stream).

        Raises:
            SyncError: a receiver refused, was missing, or does not hold what was sent. A later sync may succeed.
            ValueError: rank 0 has not opened the sync.
        """
        started = time.monotonic()
        metadata = weights_metadata(self._module, dtype=self._dtype)
        stream = parameter_stream(
            self._module,
            bucket_bytes=self._bucket_bytes,
            yields_buckets=self._rank == 0,
            dtype=self._dtype,
            weights=weights,
        )
        digest, transport = "", "gather"
        try:
            if self._rank == 0:
                digest, transport = self._opened().send(version, metadata, stream)
        except Exception:
            _use_up(stream)  # the other ranks gather to the end, whatever happened here
            raise
        _use_up(stream)
        return SyncReport(
            version=version,
            transport=transport,
            num_tensors=len(metadata),
            num_bytes=metadata.num_bytes,
            seconds=time.monotonic() - started,
            digest=digest,
        )

    def close(self) -> None:
        """End the session; the receivers' next wait fails. Harmless when nothing is open."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _opened(self) -> _Session:
        if self._session is None:
            raise ValueError("the weight sync is not open; call open(num_receivers=...) first")
        return self._session


class _Session:
    """Rank 0's connection with its receivers."""

    def __init__(self, channel: SenderChannel, *, bucket_bytes: int, device: str) -> None:
        self._channel = channel
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._attempt = 0
        self._transport: SendingTransport | None = None
        self._num_joins = 0
        self._file = self._make_file()
        self.endpoint = Endpoint(
            host=channel.host,
            port=channel.port,
            session=channel.session,
            memory=str(self._file.path) if self._file else "",
            num_receivers=channel.num_receivers,
        )

    def send(self, version: int, metadata: WeightsMetadata, stream: Iterator[Bucket]) -> tuple[str, str]:
        """One sync; the digest of what was sent, and the name of the transport."""
        self._attempt += 1
        try:
            transport = self._transport_for(self._channel.wait_for_receivers(), metadata)
            self._channel.begin(self._attempt)
            inventory = [weight_as_json(weight) for weight in metadata]
            self._channel.tell("begin", version=version, weights=inventory, plan=transport.plan.to_json())
            self._channel.hear("ready", 0, f"to be ready for sync {version}")
            self._channel.tell("go")
            transport.begin()
            digests = self._stream(transport, stream)
            digest = combine_digests(metadata, digests)
            self._channel.tell("commit", digests=digests, digest=digest)
            self._channel.hear("verified", 0, f"to verify sync {version}")
            return digest, transport.plan.name
        except ReceiverFailed as error:
            self._give_up(f"it failed at {error}")
            raise SyncError(f"sync {version} failed at {error}") from error
        except (TimeoutError, ConnectionError) as error:
            # A receiver that breaks a transfer says why; one that is late is named already.
            cause = "" if isinstance(error, TimeoutError) else self._channel.failure_of_receiver()
            reason = cause or str(error)
            self._give_up(reason)
            raise SyncError(f"sync {version} stopped: {reason}") from error
        except BaseException as error:
            self._give_up(str(error) or type(error).__name__)
            raise

    def close(self) -> None:
        """End everything."""
        self._drop_transport()
        if self._file is not None:
            self._file.remove()
        self._channel.close()

    def _stream(self, transport: SendingTransport, stream: Iterator[Bucket]) -> dict[str, int]:
        """Send all buckets; the digests of their weights."""
        sums: list[Tensor] = []
        sizes: list[tuple[str, int]] = []
        for bucket in stream:
            self._announce(bucket)
            for weight, tensor in bucket.tensors():
                sums.append(word_sum(tensor))
                sizes.append((weight.name, weight.num_bytes))
            transport.send(bucket.data)
        transport.finish()
        totals = torch.stack(sums).tolist()  # one wait for the device
        return {name: finish(total, size) for (name, size), total in zip(sizes, totals, strict=True)}

    def _announce(self, bucket: Bucket) -> None:
        entries = [[*weight_as_json(weight), offset] for weight, offset in bucket.entries]
        self._channel.tell("bucket", num_bytes=len(bucket.data), entries=entries)

    def _give_up(self, reason: str) -> None:
        with suppress(ConnectionError):
            self._channel.tell("abort", reason=reason)
        self._drop_transport()

    def _transport_for(self, joined: list[Message], metadata: WeightsMetadata) -> SendingTransport:
        """The transport of the syncs before, unless one failed or somebody joined."""
        if self._num_joins != self._channel.num_joins:
            self._drop_transport()
        if self._transport is None:
            self._transport = self._over_memory(joined, metadata) or self._over_network(joined)
            self._num_joins = self._channel.num_joins
        return self._transport

    def _over_memory(self, joined: list[Message], metadata: WeightsMetadata) -> SendingTransport | None:
        """Shared memory, if every receiver sees this node's and there is room."""
        file, self._file = self._file, None
        if not all(answer.get("shares_memory") is True for answer in joined):
            if file is not None:
                file.remove()
            return None
        file = file or self._make_file()
        if file is None:
            return None
        # A small model needs no large slots: what is reserved is taken from the node's memory.
        slot_bytes = min(self._bucket_bytes, max(1, metadata.num_bytes + ALIGNMENT * len(metadata)))
        try:
            return SharedMemorySender(self._channel, file, made_in=self._attempt, slot_bytes=slot_bytes)
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

    def _over_network(self, joined: list[Message]) -> SendingTransport:
        device = common_device([self._device, *(str(answer.get("device")) for answer in joined)])
        return CollectiveSender(self._channel, made_in=self._attempt, device=device)

    def _make_file(self) -> SharedFile | None:
        try:
            return SharedFile(shared_memory.FOLDER, self._channel.session)
        except OSError as error:
            logger.info("no shared memory for the weight sync (%s)", error)
            return None

    def _drop_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def _use_up(stream: Iterator[Bucket]) -> None:
    for _ in stream:
        pass
