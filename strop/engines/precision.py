"""Precision of a model: of its weights, and of its products on a device."""

from __future__ import annotations

import torch

from strop.engines.causal_lm import HALF
from strop.engines.config import ModelConfig
from strop.engines.flops import precision_hint
from strop.utils.device import device_name


def weights_dtype(config: ModelConfig) -> torch.dtype:
    """Precision in which weights are held; the optimizer adds small steps to them."""
    return torch.float64 if config.dtype == "float64" else torch.float32


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Precision of products on a device.

    Raises:
        ValueError: float16 on a CPU.
    """
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if config.dtype == "float16" and device.type == "cpu":
        raise ValueError(
            "model.dtype is float16, which needs an accelerator, and the device is a CPU: use float32, or bfloat16"
        )
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def half_to_read(config: ModelConfig, computes_on: torch.device, holds_half: bool) -> torch.dtype | None:
    """Precision in which linear layers are read where the folder has it; None: they learn, or compute in float32."""
    dtype = compute_dtype(config, computes_on)
    return dtype if dtype in HALF and (holds_half or config.lora.enabled) else None


def describe_precision(config: ModelConfig, device: str = "auto") -> str:
    """The precision in force, and on a CPU, where a short measurement says that the other one is faster, that one.

    `compute: float32 on cpu; products of bfloat16 run 2.6 times as fast here (model.dtype=bfloat16 uses them, at lower
    precision)`.
    """
    computes_on = torch.device(device_name(device))
    dtype = compute_dtype(config, computes_on)
    hint = precision_hint(dtype) if computes_on.type == "cpu" else ""
    return f"compute: {str(dtype).removeprefix('torch.')} on {computes_on.type}{hint}"
