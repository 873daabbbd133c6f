"""The side of the actor: weights leave its shards and go to all rollout workers at once.

Concurrency: all ranks of the actor call `send` in the same order; rank 0 talks to the receivers. Where all of them and
all receivers are on one node, each rank puts its own part of every weight into shared memory (shards.py); otherwise
weights are gathered one by one, and rank 0 sends them over the network or through a store, only the changes where all
receivers hold the last sync (delta.py). The receivers call `receive` at the same time.
Whatever goes wrong on the way, rank 0 ends it for the other ranks before it raises, so the actor's ranks stay in step
and a sync can be tried again.

    message     from       says
    begin       sender     version, metadata, transport
    ready       receiver   the metadata fit, the transport is there, and (1) it holds the weights of the last sync
    go          sender     every receiver is ready
    bucket      sender     which weights, which part of one, or which changes of them, the next bytes are
    piece       sender     of a store: which file holds the next part of the bucket, and its digest
    read        receiver   of shared memory: a slot is free again; of a store: a piece was read
    commit      sender     the digest of every weight, and which are those of the last sync and were not sent
    verified    receiver   the live parameters have these digests
    failed      receiver   instead of any of its answers: why not
    abort       sender     nothing more of this attempt comes, and why
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strop.engines.checksum.models import combine_digests
from strop.engines.weights import WeightsMetadata, weights_metadata
from strop.rollout.weight_sync import shared_memory
from strop.rollout.weight_sync.channel import ReceiverFailed, SenderChannel
from strop.rollout.weight_sync.collective import CollectiveSender, common_device
from strop.rollout.weight_sync.delta import SentWeights
from strop.rollout.weight_sync.outgoing import Outgoing, Sent
from strop.rollout.weight_sync.sender_ranks import SenderRanks
from strop.rollout.weight_sync.shared_memory import SharedFile, SharedMemoryHelper, SharedMemorySender
from strop.rollout.weight_sync.store_transport import StoreSender
from strop.rollout.weight_sync.stream import ALIGNMENT, BUCKET_BYTES, Bucket, weight_as_json
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
        dtypes: Mapping[str, torch.dtype] | None = None,
        store: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Nothing is opened yet.

        Args:
            module: the model, plain or sharded over ranks that all have a sender.
            rank: place of this process among them; 0 talks to the receivers.
            bucket_bytes: memory of a bucket; two of them are in use at a time.
            dtypes: what floating-point weights of these names are sent in; others in the dtype that they are held in.
            store: folder or URL of any kind that fsspec knows, through which the weights go; "" for shared memory on
                one node, else the network.
            timeout_s: limit of each wait for the receivers, in seconds.
        """
        self._module = module
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._dtypes = dtypes or {}
        self._store = store
        self._timeout_s = timeout_s
        self._session: _Session | None = None
        self._helper: SharedMemoryHelper | None = None

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
        self._session = _Session(channel, bucket_bytes=self._bucket_bytes, device=device, store=self._store)
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
        metadata = weights_metadata(self._module, dtypes=self._dtypes)
        outgoing = Outgoing(
            module=self._module, metadata=metadata, weights=weights, ranks=SenderRanks.of(self._rank),
            bucket_bytes=self._bucket_bytes, dtypes=self._dtypes,
        )  # fmt: skip
        digest, transport, sent_bytes = "", "shards", 0
        if self._rank == 0:
            digest, transport, sent_bytes = self._opened(outgoing).send(version, outgoing)
        else:
            self._helper = outgoing.help(self._helper)
        return SyncReport(
            version=version,
            transport=transport,
            num_tensors=len(metadata),
            num_bytes=metadata.num_bytes,
            sent_bytes=sent_bytes,
            seconds=time.monotonic() - started,
            digest=digest,
        )

    def close(self) -> None:
        """End the session; the receivers' next wait fails. Harmless when nothing is open."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _opened(self, outgoing: Outgoing) -> _Session:
        if self._session is None:
            outgoing.give_up()
            raise ValueError("the weight sync is not open; call open(num_receivers=...) first")
        return self._session


class _Session:
    """Rank 0's connection with its receivers."""

    def __init__(self, channel: SenderChannel, *, bucket_bytes: int, device: str, store: str) -> None:
        self._channel = channel
        self._store = store
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._attempt = 0
        self._transport: SendingTransport | None = None
        self._num_joins = 0
        self._base: _Base | None = None
        self._last = SentWeights()
        """Weights of `_base`, where they went over the network or a store."""
        self._file = None if store else self._make_file()
        self.endpoint = Endpoint(
            host=channel.host,
            port=channel.port,
            session=channel.session,
            memory=str(self._file.path) if self._file else "",
            num_receivers=channel.num_receivers,
        )

    def send(self, version: int, outgoing: Outgoing) -> tuple[str, str, int]:
        """One sync; the digest of what the receivers hold, the name of the transport, and the bytes that went."""
        self._attempt += 1
        metadata = outgoing.metadata
        try:
            transport = self._transport_for(self._channel.wait_for_receivers(), outgoing)
            self._channel.begin(self._attempt)
            inventory = [weight_as_json(weight) for weight in metadata]
            base, self._base = self._base, None
            self._channel.tell(
                "begin", version=version, weights=inventory, plan=transport.plan.to_json(),
                base=None if base is None else base.digest,
            )  # fmt: skip
            self._channel.hear("ready", 0, f"to be ready for sync {version}", also=1)
            self._channel.tell("go")
            transport.begin()
            if isinstance(transport, SharedMemorySender):
                sent = self._put(transport, outgoing)
            else:
                is_known = base is not None and self._channel.say_so("ready", 1)
                sent = self._stream(transport, outgoing, base.digests if base and is_known else None)
            digest = combine_digests(metadata, sent.digests)
            self._channel.tell("commit", digests=sent.digests, digest=digest, unchanged=sent.unchanged)
            self._channel.hear("verified", 0, f"to verify sync {version}")
            self._base = _Base(digest, sent.digests)
            return digest, transport.plan.name, sent.num_bytes
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
        finally:
            outgoing.give_up()  # nothing where it has ended

    def close(self) -> None:
        """End everything."""
        self._drop_transport()
        if self._file is not None:
            self._file.remove()
        self._channel.close()

    def _put(self, transport: SharedMemorySender, outgoing: Outgoing) -> Sent:
        """Hand on the buckets that all ranks fill."""
        self._last = SentWeights()
        stream, num_bytes = outgoing.shards(transport), 0
        for bucket in stream:
            self._announce(bucket)  # it lies in its slot already
            transport.send(bucket.data)
            num_bytes += len(bucket.data)
        transport.finish()
        return Sent(stream.digests, num_bytes=num_bytes)

    def _stream(
        self, transport: SendingTransport, outgoing: Outgoing, base: Mapping[str, int] | None
    ) -> Sent:
        """Send what is not as in the last sync, whose digests are `base`; everything where a receiver lacks that."""
        sent = Sent({})
        for whole in outgoing.gathered(base, sent):
            bucket = self._last.reduced(whole, is_known=base is not None)
            self._announce(bucket)
            transport.send(bucket.data)
            sent.num_bytes += len(bucket.data)
        transport.finish()
        return sent

    def _announce(self, bucket: Bucket) -> None:
        entries = [[*weight_as_json(weight), offset] for weight, offset in bucket.entries]
        self._channel.tell(
            "bucket", num_bytes=len(bucket.data), entries=entries, start=bucket.start, counts=bucket.counts
        )

    def _give_up(self, reason: str) -> None:
        with suppress(ConnectionError):
            self._channel.tell("abort", reason=reason)
        self._drop_transport()

    def _transport_for(self, joined: list[Message], outgoing: Outgoing) -> SendingTransport:
        """The transport of the syncs before, unless one failed or somebody joined."""
        if self._num_joins != self._channel.num_joins:
            self._drop_transport()
        if self._transport is None and self._store:
            self._transport = StoreSender(self._channel, self._store, made_in=self._attempt)
            self._num_joins = self._channel.num_joins
        elif self._transport is None:
            self._transport = self._over_memory(joined, outgoing.metadata)
            self._num_joins = self._channel.num_joins
        plan = None if self._transport is None else self._transport.plan
        if not outgoing.begin(plan, self._channel.session):
            if isinstance(self._transport, SharedMemorySender):  # a rank of the actor is on another node
                self._drop_transport()
            self._transport = self._transport or self._over_network(joined)
        assert self._transport is not None, "there is one for every place"
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
        slot_bytes = min(self._bucket_bytes, metadata.num_bytes + ALIGNMENT * len(metadata))
        slot_bytes = max(1, min(slot_bytes, shared_memory.SLOT_BYTES) // ALIGNMENT) * ALIGNMENT
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


@dataclass(frozen=True)
class _Base:
    """The weights that every receiver holds since the last sync: their common digest, and that of each."""

    digest: str
    digests: Mapping[str, int]
