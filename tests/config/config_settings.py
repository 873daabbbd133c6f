"""A configuration tree for the tests, with every kind of field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    lr: float = 1e-3
    """Step size."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Averaging of gradient
    and square."""
    max_grad_norm: float | None = None
    undocumented: int = 0


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    temperature: float = 1.0
    """Sampling temperature."""
    samples_per_prompt: int = 8
    stop: tuple[str, ...] = ()
    seed: int | str = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"rollout.temperature is {self.temperature}; use a value above 0")


@dataclass(frozen=True, kw_only=True)
class ToolSettings:
    name: str
    limit: int = 1


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    train_files: tuple[str, ...]
    """Files to train on."""
    prompts_per_step: int = 4
    shuffle: bool = True


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    rank: int = 8
    alpha: float = 16.0


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    path: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    mode: Literal["mean", "sum", "mean-of-means"] = "mean"
    clip: float = 0.2
    kl: bool = False


@dataclass(frozen=True, kw_only=True)
class Bare:
    data: DataSettings
    lora: LoraSettings | None
    second_lora: LoraSettings | None = field(default_factory=LoraSettings)


@dataclass(frozen=True, kw_only=True)
class Settings:
    data: DataSettings = field(default_factory=DataSettings)
    rollout: RolloutSettings = RolloutSettings()
    optim: OptimSettings = OptimSettings(lr=0.5)
    """The optimizer; its step size here is not the class's default."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    reward: RewardSettings = RewardSettings(kwargs={"strict": True})
    lora: LoraSettings | None = None
    """Low-rank adapters; null trains all weights."""
    tools: tuple[ToolSettings, ...] = ()
    steps: int = 10

    def __post_init__(self) -> None:
        if self.lora is not None and self.algorithm.kl:
            raise ValueError("lora and algorithm.kl exclude each other; set one of them")
