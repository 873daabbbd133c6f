"""Configuration of the roles."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from strop.config.sections import section
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.utils.field_types import PositiveInt


@section("actor")
class ActorConfig:
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the policy."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Batching of the policy's forward and backward passes."""
    samples_per_update: PositiveInt | Literal["all"] = "all"
    """Most samples of an optimizer step; a batch is cut evenly into as few steps as that allows. all: one step on the
    whole batch, exactly on-policy."""
    epochs: PositiveInt = 1
    """Passes over the batch of one step."""


@section("reference")
class ReferenceConfig:
    path: str = ""
    """Hugging Face folder of the frozen reference model; empty: the policy's own starting point, model.path."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Batching of its forward passes."""
