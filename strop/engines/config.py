"""Configuration of a model and of the engine that trains it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = ""
    """Hugging Face model folder: config.json, weights as safetensors, tokenizer with a chat template."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute precision; master weights stay in float32 (float64 for float64). auto: bfloat16 on an
    accelerator, float32 on a CPU, where bfloat16 is often slower."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. Off by default: it is somebody else's program."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for about a third more compute."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float64"):
            raise ValueError(f"model.dtype is {self.dtype!r}; use auto, float32, bfloat16 or float64")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: float = 1e-6
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay; not applied to biases and normalisation weights."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: float = 1e-8
    """AdamW's denominator offset."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or decaying to min_lr_ratio at the last optimizer step."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of a decaying schedule, as a share of lr."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"optim.lr is {self.lr}, but a learning rate must be above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas is {self.betas}, but AdamW needs two numbers in [0, 1)")
        if self.max_grad_norm <= 0:
            raise ValueError(
                f"optim.max_grad_norm is {self.max_grad_norm}; use a value above 0 (1e9 to never clip)"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"optim.warmup_steps is {self.warmup_steps}; use 0 for none")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(
                f"optim.min_lr_ratio is {self.min_lr_ratio}; it is a share of lr, between 0 and 1"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    max_tokens_per_device: int = 16384
    """Hard bound on the packed tokens of one forward pass. A prompt shared by several samples counts once."""

    def __post_init__(self) -> None:
        if self.max_tokens_per_device < 1:
            raise ValueError(f"engine.max_tokens_per_device is {self.max_tokens_per_device}; use at least 1")


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig:
    """What every trained role has: an optimizer and an engine."""

    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
