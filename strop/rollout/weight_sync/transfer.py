"""Receiving side of weights for rollout workers in other processes: as the workers use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from strop.rollout.types import RolloutEngine
from strop.rollout.weight_sync.target import WeightTarget
from strop.rollout.weight_sync.types import Endpoint, SyncReport


class Sender(Protocol):
    """The side of the actor; all of its ranks have one, and make the same calls."""

    def open(self, *, num_receivers: int, host: str) -> Endpoint | None:
        """Rank 0 listens for so many rollout workers on this address; other ranks have no endpoint."""
        ...

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> SyncReport:
        """Bring all of them to this version, with other weights than those of the module where these are given.

        Raises:
            SyncError: one of them does not hold what was sent.
        """
        ...

    def close(self) -> None:
        """Leave them."""
        ...


class ReceivingEngine(RolloutEngine, Protocol):
    """An engine that generates with weights that have arrived and were verified, and refuses without them."""

    def join(self, endpoint: Endpoint, *, index: int) -> None:
        """Meet the sender as its receiver of this number."""
        ...

    async def update_weights(self, version: int) -> SyncReport:
        """Take part in the sync to this version, while the sender sends it.

        Raises:
            SyncError: it failed.
        """
        ...


class WeightTransfer(Protocol):
    """Makes both sides."""

    def sender(
        self, module: nn.Module, *, rank: int, dtypes: Mapping[str, torch.dtype], store: str
    ) -> Sender:
        """Of this model, of which this rank of the actor holds all or a shard, for targets with these dtypes; through a
        store, where one is named."""
        ...

    def target(self, module: nn.Module) -> WeightTarget:
        """The parameters of a model in this process; ValueError for a sharded one."""
        ...

    def receiving(self, engine: RolloutEngine, target: WeightTarget, *, device: str) -> ReceivingEngine:
        """Around an engine that generates with these parameters, which are on this device."""
        ...


def weight_transfer() -> WeightTransfer:
    """Transfer of weights to rollout workers in other processes."""
    from strop.rollout.weight_sync import both_sides  # imports this module

    return both_sides
