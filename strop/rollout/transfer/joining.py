"""Both sides of the transfer, as the workers of the core make them (strop.rollout.sync.transfer)."""

from __future__ import annotations

from torch import nn

from strop.rollout.sync.target import WeightTarget
from strop.rollout.transfer.engine import VerifiedEngine
from strop.rollout.transfer.receiver import WeightReceiver
from strop.rollout.transfer.sender import WeightSender
from strop.rollout.transfer.target import ModuleTarget
from strop.rollout.types import RolloutEngine


def sender(module: nn.Module, *, rank: int) -> WeightSender:
    """The side of this rank of the actor."""
    return WeightSender(module, rank=rank)


def target(module: nn.Module) -> ModuleTarget:
    """The parameters of a model in this process."""
    return ModuleTarget(module)


def receiving(engine: RolloutEngine, target: WeightTarget, *, device: str) -> VerifiedEngine:
    """The engine of a rollout worker, whose parameters are kept at the versions that arrive."""
    return VerifiedEngine(engine, WeightReceiver(target, device=device))
