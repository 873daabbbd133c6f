"""The weights of one sync, as a rank of the actor gives them: shard by shard, or gathered one by one.

Concurrency: every method is called by all ranks of the actor in the same order, as sender.py says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from strop.engines.checksum.host import digest_tensor
from strop.engines.checksum.models import digest_of_shards, sums_add_up
from strop.engines.parallel.first_rank import GatherToFirst
from strop.engines.parallel.pipeline import pipeline_of
from strop.engines.weights import TensorMetadata, WeightsMetadata
from strop.rollout.weight_sync.cuda_ipc import SharingDevice
from strop.rollout.weight_sync.device_slots import PLAN_NAME, OpenedSlots
from strop.rollout.weight_sync.sender_ranks import SenderRanks
from strop.rollout.weight_sync.shards import ShardStream
from strop.rollout.weight_sync.shared_memory import opened_file_slots
from strop.rollout.weight_sync.slots import SlotHelper, SlotMemory, SlotSender
from strop.rollout.weight_sync.stream import Bucket, parameter_stream
from strop.rollout.weight_sync.transport import Plan

logger = logging.getLogger(__name__)


@dataclass
class Sent:
    """Account of one sync on the sender's side."""

    digests: dict[str, int]
    """Of all weights by name."""
    unchanged: list[str] = field(default_factory=list)
    """Names of the weights that the receivers had already."""
    num_bytes: int = 0
    """Bytes of the buckets that went to each receiver."""


@dataclass(kw_only=True)
class Outgoing:
    """The weights of one sync, as a rank of the actor gives them: shard by shard, or gathered one by one.

    Rank 0 says how (`begin`); whatever happens afterwards, `give_up` lets the other ranks go.
    """

    module: nn.Module
    metadata: WeightsMetadata
    weights: Iterable[tuple[str, Tensor]] | None
    ranks: SenderRanks
    bucket_bytes: int
    dtypes: Mapping[str, torch.dtype]

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
        failed = self.ranks.failed(False)
        self._end = (lambda: self.ranks.hear({"ends": True})) if failed else (lambda: self.ranks.go_on(False))
        return failed

    def begin_gathered(self) -> None:
        """On rank 0: tell the others that the weights are gathered."""
        self.ranks.hear({"plan": None})
        self._end = lambda: _use_up(self.gathered())

    def help(self, helper: SlotHelper | None, device: SharingDevice | None) -> SlotHelper | None:
        """On every other rank: take part, as rank 0 says; the slots, for the next time.

        Args:
            helper: slots of the sync before.
            device: on which this rank has its weights, if its memory can be shared.
        """
        while True:
            heard = self.ranks.hear()
            if heard.get("ends"):
                return helper
            if heard["plan"] is None:
                _close(helper)
                _use_up(self.gathered())
                return None
            plan, failure = Plan(**heard["plan"]), False
            try:
                if helper is None or helper.plan != plan:
                    _close(helper)
                    helper = None
                    helper = SlotHelper(opened_slots(plan, device, heard["session"]), plan)
            except OSError as error:
                level = (
                    logging.WARNING if plan.name == PLAN_NAME else logging.INFO
                )  # or it is on another node
                logger.log(level, "this rank of the actor cannot open the %s of rank 0: %s", plan.name, error)
                failure = True
            if not self.ranks.failed(failure):
                break
        assert helper is not None, "no rank has failed"
        helper.begin()
        for _ in self.shards(helper):
            pass
        return helper

    def shards(self, slots: SlotSender | SlotHelper) -> ShardStream:
        """The buckets that all ranks fill."""
        stream = ShardStream(
            self.module, self.metadata, bucket_bytes=slots.plan.slot_bytes, slots=slots, ranks=self.ranks,
            weights=self.weights,
        )  # fmt: skip
        self._end = stream.close
        return stream

    def gathered(self, base: Mapping[str, int] | None = None, sent: Sent | None = None) -> Iterator[Bucket]:
        """Buckets of weights that all ranks gather; those of rank 0 alone are filled.

        Args:
            base: on rank 0, digests of what the receivers have: such weights are left out.
            sent: learns the digest of each weight, and which were left out.
        """
        known: dict[str, int] = self.ranks.hear({"base": base or {}} if self.ranks.rank == 0 else None)[
            "base"
        ]
        sent = sent or Sent({})

        def is_unchanged(weight: TensorMetadata, digest: int) -> bool:
            sent.digests[weight.name] = digest
            if known.get(weight.name) != digest:
                return False
            sent.unchanged.append(weight.name)
            return True

        def skips(weight: TensorMetadata, shard: Tensor) -> bool:
            return self._adds_up(weight, shard) and is_unchanged(weight, self._digest(weight, shard))

        def drops(weight: TensorMetadata, whole: Tensor) -> bool:
            return weight.name not in sent.digests and is_unchanged(weight, digest_tensor(whole))

        stream = parameter_stream(
            self.module, bucket_bytes=self.bucket_bytes, gathers=GatherToFirst(), dtypes=self.dtypes,
            weights=self.weights, skips=skips, drops=drops,
        )  # fmt: skip
        self._end = lambda: _use_up(stream)
        return stream

    def _adds_up(self, weight: TensorMetadata, shard: Tensor) -> bool:
        """The ranks find the digest of a weight without a gather. All of them come to the same answer; ranks of other
        stages do not know how a weight is cut."""
        return pipeline_of(self.module) is not None or sums_add_up(shard, weight.dtype)

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


def opened_slots(plan: Plan, device: SharingDevice | None, session: str) -> SlotMemory:
    """Slots of rank 0 that this rank fills; OSError where it cannot open them."""
    if plan.name == PLAN_NAME:
        return OpenedSlots(device, plan)
    return opened_file_slots(plan, session=session, is_written=True)


def _close(helper: SlotHelper | None) -> None:
    if helper is not None:
        helper.close()


def _use_up(stream: Iterator[Bucket]) -> None:
    for _ in stream:
        pass
