"""The weights of one sync, as a rank of the actor gives them: shard by shard, or gathered one by one.

Concurrency: every method is called by all ranks of the actor in the same order, as sender.py says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from strop.engines.checksum.models import digest_of_shards
from strop.engines.parallel.pipeline import pipeline_of
from strop.engines.weights import TensorMetadata, WeightsMetadata
from strop.rollout.weight_sync.sender_ranks import SenderRanks
from strop.rollout.weight_sync.shards import ShardStream
from strop.rollout.weight_sync.shared_memory import SharedMemoryHelper, SharedMemorySender
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

        def is_unchanged(weight: TensorMetadata, shard: Tensor) -> bool:
            digest = sent.digests[weight.name] = self._digest(weight, shard)
            if known.get(weight.name) != digest:
                return False
            sent.unchanged.append(weight.name)
            return True

        stream = parameter_stream(
            self.module, bucket_bytes=self.bucket_bytes, yields_buckets=self.ranks.rank == 0, dtypes=self.dtypes,
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
