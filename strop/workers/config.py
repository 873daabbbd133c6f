"""Configuration of the roles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from strop.engines.config import EngineConfig, OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the policy."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How the policy's forward and backward passes are cut."""
    samples_per_update: int | Literal["all"] = "all"
    """Samples per optimizer step; all: one step on the whole batch, exactly on-policy."""
    epochs: int = 1
    """Passes over the batch of one step."""

    def __post_init__(self) -> None:
        if self.samples_per_update != "all" and int(self.samples_per_update) < 1:
            raise ValueError(f"actor.samples_per_update is {self.samples_per_update}; use at least 1, or all")
        if self.epochs < 1:
            raise ValueError(f"actor.epochs is {self.epochs}; use at least 1")


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    path: str = ""
    """Hugging Face folder of the frozen reference model; empty: the policy's own starting point, model.path."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How its forward passes are cut."""
