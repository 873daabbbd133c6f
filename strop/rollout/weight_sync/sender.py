"""The side of the actor: weights leave its shards and go to all rollout workers at once.

Concurrency: all ranks of the actor call `send` in the same order; rank 0 talks to the receivers. Where all of them and
all receivers are on one node, each rank puts its own part of every weight into shared memory (shards.py); otherwise
weights are gathered one by one, and rank 0 sends them over the network. The receivers call `receive` at the same time.
Whatever goes wrong on the way, rank 0 ends it for the other ranks before it raises, so the actor's ranks stay in step
and a sync can be tried again.

    message     from       says
    begin       sender     version, metadata, transport
    ready       receiver   the metadata fit, the transport is there, and (1) it holds the weights of the last sync
    go          sender     every receiver is ready
    bucket      sender     which weights, or which part of one, the next bytes are
    read        receiver   of shared memory: a slot is free again
    commit      sender     the digest of every weight, and which are those of the last sync and were not sent
    verified    receiver   the live parameters have these digests
    failed      receiver   instead of any of its answers: why not
    abort       sender     nothing more of this attempt comes, and why
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from strop.engines.checksum.models import combine_digests, digest_of_shards
from strop.engines.parallel.pipeline import pipeline_of
from strop.engines.weights import TensorMetadata, WeightsMetadata, weights_metadata
from strop.rollout.weight_sync import shared_memory
from strop.rollout.weight_sync.channel import ReceiverFailed, SenderChannel
from strop.rollout.weight_sync.collective import CollectiveSender, common_device
from strop.rollout.weight_sync.sender_ranks import SenderRanks
from strop.rollout.weight_sync.shards import ShardStream
from strop.rollout.weight_sync.shared_memory import SharedFile, SharedMemoryHelper, SharedMemorySender
from strop.rollout.weight_sync.stream import ALIGNMENT, BUCKET_BYTES, Bucket, parameter_stream, weight_as_json
from strop.rollout.weight_sync.transport import Plan, SendingTransport
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
        outgoing = _Outgoing(
            module=self._module, metadata=metadata, weights=weights, ranks=SenderRanks.of(self._rank),
            bucket_bytes=self._bucket_bytes, dtype=self._dtype,
        )  # fmt: skip
        digest, transport = "", "shards"
        if self._rank == 0:
            digest, transport = self._opened(outgoing).send(version, outgoing)
        else:
            self._helper = outgoing.help(self._helper)
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

    def _opened(self, outgoing: _Outgoing) -> _Session:
        if self._session is None:
            outgoing.give_up()
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
        self._base: _Base | None = None
        self._file = self._make_file()
        self.endpoint = Endpoint(
            host=channel.host,
            port=channel.port,
            session=channel.session,
            memory=str(self._file.path) if self._file else "",
            num_receivers=channel.num_receivers,
        )

    def send(self, version: int, outgoing: _Outgoing) -> tuple[str, str]:
        """One sync; the digest of what was sent, and the name of the transport."""
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
                sent = _Sent(self._put(transport, outgoing))
            else:
                is_known = base is not None and self._channel.say_so("ready", 1)
                sent = self._stream(transport, outgoing, base.digests if base and is_known else {})
            digest = combine_digests(metadata, sent.digests)
            self._channel.tell("commit", digests=sent.digests, digest=digest, unchanged=sent.unchanged)
            self._channel.hear("verified", 0, f"to verify sync {version}")
            self._base = _Base(digest, sent.digests)
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
        finally:
            outgoing.give_up()  # nothing where it has ended

    def close(self) -> None:
        """End everything."""
        self._drop_transport()
        if self._file is not None:
            self._file.remove()
        self._channel.close()

    def _put(self, transport: SharedMemorySender, outgoing: _Outgoing) -> dict[str, int]:
        """Hand on the buckets that all ranks fill; the digests of their weights."""
        stream = outgoing.shards(transport)
        for bucket in stream:
            self._announce(bucket)  # it lies in its slot already
            transport.send(bucket.data)
        transport.finish()
        return stream.digests

    def _stream(self, transport: SendingTransport, outgoing: _Outgoing, base: Mapping[str, int]) -> _Sent:
        """Send buckets of those weights that are not the ones that the receivers have."""
        sent = _Sent({})
        for bucket in outgoing.gathered(base, sent):
            self._announce(bucket)
            transport.send(bucket.data)
        transport.finish()
        return sent

    def _announce(self, bucket: Bucket) -> None:
        entries = [[*weight_as_json(weight), offset] for weight, offset in bucket.entries]
        self._channel.tell("bucket", num_bytes=len(bucket.data), entries=entries, start=bucket.start)

    def _give_up(self, reason: str) -> None:
        with suppress(ConnectionError):
            self._channel.tell("abort", reason=reason)
        self._drop_transport()

    def _transport_for(self, joined: list[Message], outgoing: _Outgoing) -> SendingTransport:
        """The transport of the syncs before, unless one failed or somebody joined."""
        if self._num_joins != self._channel.num_joins:
            self._drop_transport()
        if self._transport is None:
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


@dataclass
class _Sent:
    """Digests of all weights of a sync, and the names of those that the receivers had already."""

    digests: dict[str, int]
    unchanged: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Base:
    """The weights that every receiver holds since the last sync: their common digest, and that of each."""

    digest: str
    digests: Mapping[str, int]


@dataclass(kw_only=True)
class _Outgoing:
    """The weights of one sync, as a rank of the actor gives them: shard by shard, or gathered one by one.

    Rank 0 says how (`begin`); whatever happens afterwards, `give_up` lets the other ranks go.
    """

    module: nn.Module
    metadata: WeightsMetadata
    weights: Iterable[tuple[str, Tensor]] | None
    ranks: SenderRanks
    bucket_bytes: int
    dtype: torch.dtype | None

    def __post_init__(self) -> None:
        self._end: Callable[[], object] = lambda: self.ranks.hear({"ends": True})
        """On rank 0: lets the others go, which wait for what comes next."""

    def begin(self, plan: Plan | None, session: str) -> bool:
        """On rank 0: tell the others how the weights leave; True if all of them see the shared memory.

        Args:
            plan: of the transport; None for one that is not made yet.
            session: of the shared memory.
        """
        is_shared = plan is not None and plan.name == "shared_memory"
        self.ranks.hear({"plan": plan.to_json() if plan and is_shared else None, "session": session})
        if is_shared and not self.ranks.failed(False):
            self._end = lambda: self.ranks.go_on(False)
            return True
        self._end = lambda: _use_up(self.gathered())
        return False

    def help(self, helper: SharedMemoryHelper | None) -> SharedMemoryHelper | None:
        """On every other rank: take part, as rank 0 says; the shared memory, for the next time."""
        heard = self.ranks.hear()
        if heard.get("ends"):
            return helper
        if heard["plan"] is None:
            _use_up(self.gathered())
            return None
        plan, failure = Plan(**heard["plan"]), False
        try:
            if helper is None or helper.plan != plan:
                helper = SharedMemoryHelper(plan, session=heard["session"])
        except OSError as error:
            logger.info("this rank of the actor is on another node than rank 0 (%s)", error)
            failure, helper = True, None
        if self.ranks.failed(failure):
            _use_up(self.gathered())
            return None
        assert helper is not None, "no rank has failed"
        helper.begin()
        for _ in self.shards(helper):
            pass
        return helper

    def shards(self, room: SharedMemorySender | SharedMemoryHelper) -> ShardStream:
        """The buckets that all ranks fill."""
        stream = ShardStream(
            self.module, self.metadata, bucket_bytes=room.plan.slot_bytes, room=room.room, ranks=self.ranks,
            weights=self.weights,
        )  # fmt: skip
        self._end = stream.close
        return stream

    def gathered(self, base: Mapping[str, int] | None = None, sent: _Sent | None = None) -> Iterator[Bucket]:
        """Buckets of weights that all ranks gather; those of rank 0 alone are filled.

        Args:
            base: on rank 0, digests of what the receivers have: such weights are left out.
            sent: learns the digest of each weight, and which were left out.
        """
        known: dict[str, int] = self.ranks.hear({"base": base or {}} if self.ranks.rank == 0 else None)[
            "base"
        ]
        sent = sent or _Sent({})

        def is_unchanged(weight: TensorMetadata, shard: Tensor) -> bool:
            digest = sent.digests[weight.name] = self._digest(weight, shard)
            if known.get(weight.name) != digest:
                return False
            sent.unchanged.append(weight.name)
            return True

        stream = parameter_stream(
            self.module, bucket_bytes=self.bucket_bytes, yields_buckets=self.ranks.rank == 0, dtype=self.dtype,
            weights=self.weights, skips=is_unchanged,
        )  # fmt: skip
        self._end = lambda: _use_up(stream)
        return stream

    def _digest(self, weight: TensorMetadata, shard: Tensor) -> int:
        """Digest of a weight, on every rank, from the ranks that hold its shards."""
        pipeline = pipeline_of(self.module)
        if pipeline is None:
            return digest_of_shards(shard, weight.dtype)
        name = weight.name
        own = {name: digest_of_shards(shard, weight.dtype)} if pipeline.is_mine(name) else {}
        return pipeline.of_all_stages(own)[name]

    def give_up(self) -> None:
        """On rank 0: let the others go; harmless where all has ended."""
        self._end()
        self._end = lambda: None


def _use_up(stream: Iterator[Bucket]) -> None:
    for _ in stream:
        pass
