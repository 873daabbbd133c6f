"""The side of the actor: weights leave its shards and go to all rollout workers at once.

Concurrency: all ranks of the actor call `send` in the same order; rank 0 talks to the receivers. Nothing is gathered.
Where all ranks and all receivers are on one node, each rank puts its own part of every weight into memory that they
share (shards.py): of rank 0's device where all have one that opens it (device_slots.py), else of the node
(shared_memory.py). Otherwise each rank sends its own pieces of every bucket over the network or through a store, only
the changes where all receivers hold the last sync (pieces.py, delta.py). The receivers call `receive` at the same time.
Whatever goes wrong on the way, rank 0 ends it for the other ranks before it raises, so the actor's ranks stay in step
and a sync can be tried again.

    message     from       says
    offer       sender     memory of its device, before a sync whose weights could go there
    opened      receiver   it has opened it (1), or why it cannot (0)
    begin       sender     version, metadata, transport
    ready       receiver   the metadata fit, the transport is there, and (1) it holds the weights of the last sync
    go          sender     every receiver is ready
    bucket      sender     which weights, which part of one, or which changes of them, the next bytes are, and which
                           rank gives which of them
    read        receiver   of memory that is shared: a slot is free again; of a store: a bucket was read
    commit      sender     the digest of every weight, and which are those of the last sync and were not sent
    verified    receiver   the live parameters have these digests
    failed      receiver   instead of any of its answers: why not
    abort       sender     nothing more of this attempt comes, and why
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strop.engines.checksum.models import combine_digests
from strop.engines.weights import weights_metadata
from strop.rollout.weight_sync.channel import ReceiverFailed, SenderChannel
from strop.rollout.weight_sync.cuda_ipc import DeviceOf, SharingDevice, sharing_device
from strop.rollout.weight_sync.delta import SentParts
from strop.rollout.weight_sync.outgoing import Helper, Outgoing
from strop.rollout.weight_sync.pieces import PieceStream
from strop.rollout.weight_sync.sender_ranks import SenderRanks
from strop.rollout.weight_sync.slots import SlotSender
from strop.rollout.weight_sync.stream import BUCKET_BYTES, Announcement, weight_as_json
from strop.rollout.weight_sync.transport_choice import TransportChoice
from strop.rollout.weight_sync.types import Endpoint, SyncError, SyncReport

TIMEOUT_S = 120.0
"""Limit of one wait for the other side: a step of the protocol, never a whole sync."""


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
        device_of: DeviceOf = sharing_device,
    ) -> None:
        """Nothing is opened yet.

        Args:
            module: the model, plain or sharded over ranks that all have a sender.
            rank: place of this process among them; 0 talks to the receivers.
            bucket_bytes: memory of a bucket; two of them are in use at a time.
            dtypes: what floating-point weights of these names are sent in; others in the dtype that they are held in.
            store: folder or URL of any kind that fsspec knows, through which the weights go; "" for memory that the two
                sides share on one node, else the network.
            timeout_s: limit of each wait for the receivers, in seconds.
            device_of: gives the calls that share memory of the device the weights are on.
        """
        self._module = module
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._dtypes = dtypes or {}
        self._store = store
        self._timeout_s = timeout_s
        self._device_of = device_of
        self._session: _Session | None = None
        self._helper: Helper | None = None
        self._last = SentParts()

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
        choice = TransportChoice(channel, bucket_bytes=self._bucket_bytes, device=device, store=self._store)
        self._session = _Session(channel, choice)
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
            bucket_bytes=self._bucket_bytes, last=self._last,
        )  # fmt: skip
        device = self._device_of(_device_of_weights(self._module))
        if self._rank == 0:
            digest, transport, sent_bytes = self._opened(outgoing).send(version, outgoing, device)
        else:
            helper, self._helper = self._helper, None
            self._helper = outgoing.help(helper, device)
            digest, transport, sent_bytes = "", outgoing.transport, outgoing.sent_bytes
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
        if self._helper is not None:
            self._helper.close()
            self._helper = None
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

    def __init__(self, channel: SenderChannel, choice: TransportChoice) -> None:
        self._channel = channel
        self._choice = choice
        self._attempt = 0
        self._base: str | None = None
        """Digest of the weights that every receiver holds since the last sync."""
        self.endpoint = Endpoint(
            host=channel.host,
            port=channel.port,
            session=channel.session,
            memory=choice.memory_path,
            num_receivers=channel.num_receivers,
        )

    def send(self, version: int, outgoing: Outgoing, device: SharingDevice | None) -> tuple[str, str, int]:
        """One sync; the digest of what the receivers hold, the name of the transport, and the bytes that went.

        `device`: of the weights, if its memory can be shared.
        """
        self._attempt += 1
        metadata = outgoing.metadata
        try:
            joined = self._channel.wait_for_receivers()
            self._channel.begin(self._attempt)
            transport = self._choice.choose(version, self._attempt, outgoing, joined=joined, device=device)
            inventory = [weight_as_json(weight) for weight in metadata]
            base, self._base = self._base, None
            self._channel.tell(
                "begin", version=version, weights=inventory, plan=transport.plan.to_json(),
                base=base,
            )  # fmt: skip
            self._channel.hear("ready", 0, f"to be ready for sync {version}", also=1)
            self._channel.tell("go")
            if isinstance(transport, SlotSender):
                sent = self._put(transport, outgoing)
            else:
                is_known = base is not None and self._channel.say_so("ready", 1)
                sent = self._send_pieces(outgoing.pieces(transport, is_known=is_known))
            digest = combine_digests(metadata, sent.digests)
            self._channel.tell("commit", digests=sent.digests, digest=digest, unchanged=sent.unchanged)
            self._channel.hear("verified", 0, f"to verify sync {version}")
            self._base = digest
            return digest, transport.plan.name, sent.num_bytes
        except ReceiverFailed as error:
            self._give_up(f"it failed at {error}", outgoing)
            raise SyncError(f"sync {version} failed at {error}") from error
        except (TimeoutError, ConnectionError) as error:
            # A receiver that breaks a transfer says why; one that is late is named already.
            cause = "" if isinstance(error, TimeoutError) else self._channel.failure_of_receiver()
            reason = cause or str(error)
            self._give_up(reason, outgoing)
            raise SyncError(f"sync {version} stopped: {reason}") from error
        except BaseException as error:
            self._give_up(str(error) or type(error).__name__, outgoing)
            raise
        finally:
            outgoing.give_up()  # nothing where it has ended

    def close(self) -> None:
        """End everything."""
        self._choice.close()
        self._channel.close()

    def _put(self, transport: SlotSender, outgoing: Outgoing) -> _Sent:
        """Hand on the buckets that all ranks fill."""
        transport.begin()
        stream, num_bytes = outgoing.shards(transport), 0
        for bucket in stream:
            self._announce(bucket)  # it lies in its slot already
            transport.send(bucket.data)
            num_bytes += len(bucket.data)
        transport.finish()
        return _Sent(stream.digests, (), num_bytes)

    def _send_pieces(self, stream: PieceStream) -> _Sent:
        """Announce the buckets of which all ranks send their pieces."""
        for bucket in stream:
            self._announce(bucket)
        return _Sent(stream.digests, stream.unchanged, stream.sent_bytes)

    def _announce(self, bucket: Announcement) -> None:
        entries = [[*weight_as_json(weight), offset] for weight, offset in bucket.entries]
        changes = {name: [part.to_json() for part in parts] for name, parts in bucket.changes.items()}
        pieces = [[runs.to_json() for runs in piece] for piece in bucket.pieces]
        self._channel.tell(
            "bucket",
            num_bytes=bucket.num_bytes,
            entries=entries,
            start=bucket.start,
            changes=changes,
            pieces=pieces,
        )

    def _give_up(self, reason: str, outgoing: Outgoing) -> None:
        """Tell the receivers, and end the transport: a store once no rank writes any more, a group before the other
        ranks hear of it, which may wait in it."""
        with suppress(ConnectionError):
            self._channel.tell("abort", reason=reason)
        if self._choice.uses_store:
            outgoing.give_up()
        self._choice.drop()


@dataclass(frozen=True)
class _Sent:
    """Account of one sync on rank 0."""

    digests: Mapping[str, int]
    """Of all weights by name."""
    unchanged: Sequence[str]
    """Names of the weights that the receivers had already."""
    num_bytes: int
    """That this rank sent; of shared memory that all ranks put there."""


def _device_of_weights(module: nn.Module) -> torch.device:
    """Device of the first weight that this rank holds; other stages have theirs elsewhere."""
    return next((weight.device for weight in module.parameters() if not weight.is_meta), torch.device("cpu"))
