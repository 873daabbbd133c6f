"""A configuration tree for the tests, with every kind of field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Gt

from strop.config.sections import section
from strop.utils.field_types import PositiveFloat, PositiveInt, Share


@section("optim")
class OptimSettings:
    lr: float = 1e-3
    """Step size."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Averaging of gradient
    and square."""
    max_grad_norm: PositiveFloat | None = None
    undocumented: int = 0


@section("rollout")
class RolloutSettings:
    temperature: Annotated[float, Gt(0), "greedy decoding is for evaluation"] = 1.0
    """Sampling temperature."""
    samples_per_prompt: PositiveInt = 8
    stop: tuple[str, ...] = ()
    seed: int | str = 0


@dataclass(frozen=True, kw_only=True)
class ToolSettings:
    name: str = ""
    limit: PositiveInt = 1


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    train_files: tuple[str, ...] = ()
    """Files to train on."""
    prompts_per_step: int = 4
    shuffle: bool = True


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    path: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Share] = field(default_factory=dict)


@section("algorithm")
class AlgorithmSettings:
    mode: Literal["mean", "sum", "mean-of-means"] = "mean"
    clip: float = 0.2
    kl: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    data: DataSettings = field(default_factory=DataSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    optim: OptimSettings = field(default_factory=lambda: OptimSettings(lr=0.5))
    """The optimizer; its step size here is not the class's default."""
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    reward: RewardSettings = RewardSettings(kwargs={"strict": True})
    tools: tuple[ToolSettings, ...] = ()
    steps: int = 10

    def __post_init__(self) -> None:
        if self.tools and self.algorithm.kl:
            raise ValueError("tools and algorithm.kl exclude each other; set one of them")
