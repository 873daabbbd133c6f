"""The weights of one sync, as a rank of the actor gives them: into memory that all see, or in pieces of its own.

Concurrency: every method is called by all ranks of the actor in the same order, as sender.py says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from strop.engines.weights import WeightsMetadata
from strop.rollout.weight_sync.channel import SenderChannel
from strop.rollout.weight_sync.collective import PLAN_NAME as COLLECTIVE
from strop.rollout.weight_sync.collective import CollectiveSender
from strop.rollout.weight_sync.cuda_ipc import SharingDevice
from strop.rollout.weight_sync.delta import SentParts
from strop.rollout.weight_sync.device_slots import PLAN_NAME as DEVICE
from strop.rollout.weight_sync.device_slots import OpenedSlots
from strop.rollout.weight_sync.own_parts import OwnParts
from strop.rollout.weight_sync.pieces import PieceStream, PieceTransport
from strop.rollout.weight_sync.sender_ranks import SenderRanks
from strop.rollout.weight_sync.shards import ShardStream
from strop.rollout.weight_sync.shared_memory import opened_file_slots
from strop.rollout.weight_sync.slots import SlotHelper, SlotMemory, SlotSender
from strop.rollout.weight_sync.store_transport import PLAN_NAME as STORE
from strop.rollout.weight_sync.store_transport import StoreSender
from strop.rollout.weight_sync.transport import Plan

Helper = SlotHelper | CollectiveSender | StoreSender
"""A rank's side of the transport, on all but rank 0."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Outgoing:
    """The weights of one sync, as a rank of the actor gives them: into memory that all see, or in pieces of its own.

    Rank 0 says how (`begin`); whatever happens afterwards, `give_up` lets the other ranks go.
    """

    module: nn.Module
    metadata: WeightsMetadata
    weights: Iterable[tuple[str, Tensor]] | None
    ranks: SenderRanks
    bucket_bytes: int
    last: SentParts
    """This rank's parts as it sent them last, over the network or through a store."""
    transport: str = field(default="shards", init=False)
    """As of `SyncReport`."""
    sent_bytes: int = field(default=0, init=False)
    """As of `SyncReport`."""

    def __post_init__(self) -> None:
        self._end: Callable[[], object] = lambda: self.ranks.hear({"ends": True})
        """On rank 0: lets the others go, which wait for what comes next."""

    def begin_shards(self, plan: Plan, session: str) -> list[int]:
        """On rank 0: tell the others into which slots the weights go; the ranks that cannot open them, where there are
        any. Then rank 0 begins again.

        Args:
            plan: of the slots.
            session: of the shared memory.
        """
        self.ranks.hear({"plan": plan.to_json(), "session": session})
        failed, _ = self.ranks.failed(False)
        self._end = (lambda: self.ranks.hear({"ends": True})) if failed else (lambda: self.ranks.go_on(False))
        return failed

    def begin_pieces(self, plan: Plan, channel: SenderChannel) -> None:
        """On rank 0: tell the others over what they send their pieces; they wait until the receivers are ready."""
        self.ranks.hear(
            {
                "plan": plan.to_json(),
                "session": channel.session,
                "host": channel.host,
                "timeout_s": channel.timeout_s,
            }
        )
        self._end = lambda: self.ranks.hear({"ends": True})

    def help(self, helper: Helper | None, device: SharingDevice | None) -> Helper | None:
        """On every other rank: take part, as rank 0 says; its side of the transport, for the next time.

        Args:
            helper: side of the transport of the sync before.
            device: on which this rank has its weights, if its memory can be shared.
        """
        while True:
            heard = self.ranks.hear()
            if heard.get("ends"):
                return helper
            plan = Plan(**heard["plan"])
            if helper is None or helper.plan != plan:
                _close(helper)
                helper = None
            if plan.name in (COLLECTIVE, STORE):
                helper = helper or _piece_sender(plan, self.ranks.rank, heard)
                assert isinstance(helper, CollectiveSender | StoreSender), "as its plan says"
                return self._help_with_pieces(helper)
            failure = False
            try:
                helper = helper or SlotHelper(opened_slots(plan, device, heard["session"]), plan)
            except OSError as error:
                level = logging.WARNING if plan.name == DEVICE else logging.INFO  # or it is on another node
                logger.log(level, "this rank of the actor cannot open the %s of rank 0: %s", plan.name, error)
                failure = True
            if not self.ranks.failed(failure)[0]:
                break
        assert isinstance(helper, SlotHelper), "no rank has failed"
        helper.begin()
        for _ in self.shards(helper):
            pass
        return helper

    def _help_with_pieces(self, helper: CollectiveSender | StoreSender) -> Helper | None:
        heard = self.ranks.hear()
        if heard.get("ends"):
            helper.close()
            return None
        stream = self.pieces(helper, is_known=heard["is_known"])
        try:
            for _ in stream:
                pass
        finally:
            self.sent_bytes = stream.sent_bytes
            if not stream.is_complete:
                helper.close()  # no receiver waits for this rank
        return helper if stream.is_complete else None

    def shards(self, slots: SlotSender | SlotHelper) -> ShardStream:
        """The buckets that all ranks fill."""
        self.last.clear()
        stream = ShardStream(self._own_parts(slots.plan.slot_bytes), slots)
        self._end = stream.close
        return stream

    def pieces(self, transport: PieceTransport, *, is_known: bool) -> PieceStream:
        """The buckets of which each rank sends its pieces; rank 0 calls this where the receivers are ready.

        `is_known`: every receiver holds the weights of the last sync.
        """
        if self.ranks.rank == 0:
            self.ranks.hear({"is_known": is_known})
        self.transport = transport.plan.name
        parts = self._own_parts(min(self.bucket_bytes, transport.max_bucket_bytes))
        stream = PieceStream(parts, transport, last=self.last, is_known=is_known)
        self._end = stream.close
        return stream

    def _own_parts(self, bucket_bytes: int) -> OwnParts:
        return OwnParts(
            self.module, self.metadata, ranks=self.ranks, bucket_bytes=bucket_bytes, weights=self.weights
        )

    def give_up(self) -> None:
        """On rank 0: let the others go; harmless where all has ended."""
        end, self._end = self._end, lambda: None
        try:
            end()
        except RuntimeError as error:  # of the group: a rank is gone, which the caller's error is about
            logger.warning("the other ranks of the actor do not hear that the sync has ended: %s", error)


def opened_slots(plan: Plan, device: SharingDevice | None, session: str) -> SlotMemory:
    """Slots of rank 0 that this rank fills; OSError where it cannot open them."""
    if plan.name == DEVICE:
        return OpenedSlots(device, plan)
    return opened_file_slots(plan, session=session, is_written=True)


def _piece_sender(plan: Plan, rank: int, heard: Mapping[str, Any]) -> CollectiveSender | StoreSender:
    """This rank's side of the network or the store, as rank 0 says."""
    session, timeout_s = heard["session"], heard["timeout_s"]
    if plan.name == STORE:
        return StoreSender(plan, rank=rank, secret=session, timeout_s=timeout_s)
    return CollectiveSender(plan, rank=rank, host=heard["host"], secret=session, timeout_s=timeout_s)


def _close(helper: Helper | None) -> None:
    if helper is not None:
        helper.close()
