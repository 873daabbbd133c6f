"""Both sides of the transfer, as the workers of the core make them (strop.rollout.weight_sync.transfer)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from strop.rollout.types import RolloutEngine
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.target import WeightTarget
from strop.rollout.weight_sync.verified_engine import VerifiedEngine


def sender(module: nn.Module, *, rank: int, dtypes: Mapping[str, torch.dtype], store: str) -> WeightSender:
    """The side of this rank of the actor."""
    return WeightSender(module, rank=rank, dtypes=dtypes, store=store)


def target(module: nn.Module) -> ModuleTarget:
    """The parameters of a model in this process."""
    return ModuleTarget(module)


def receiving(engine: RolloutEngine, target: WeightTarget, *, device: str) -> VerifiedEngine:
    """The engine of a rollout worker, whose parameters are kept at the versions that arrive."""
    return VerifiedEngine(engine, WeightReceiver(target, device=device))
