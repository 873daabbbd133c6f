"""RMS norms, SwiGLU and rotary embeddings through liger-kernel's Triton kernels.

They keep fewer activations than norms and rotations that are one kernel each, at the same speed
(benchmarks/RESULTS.md).
Liger's own loss kernels are left out, because the head here gives log-probs in chunks (head.py).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_KERNELS = {
    "rms_norm": True,
    "swiglu": True,
    "geglu": True,
    "rope": True,
    "layer_norm": False,
    "cross_entropy": False,
    "fused_linear_cross_entropy": False,
}
"""Arguments of liger's functions; each architecture's function takes some of them."""
_ROTARY = "apply_rotary_pos_emb"


def use_liger_kernels(module: nn.Module, device: torch.device) -> None:
    """Replace norms, gated activations and rotary embeddings of this model.

    Norms and activations change in this instance alone. A rotary embedding is a function of the architecture's
    module in transformers, so every model of the architecture in this process gets the kernel, for tensors that are
    not in host memory; the others keep the function that was there.

    Args:
        module: a Hugging Face model, just loaded.
        device: where it will compute.

    Raises:
        ValueError: the device is a CPU, liger-kernel is not installed, or it has nothing for this architecture.
    """
    if device.type == "cpu":
        raise ValueError(
            "model.use_liger is true, but the model computes on a CPU, for which liger-kernel has no kernels; set "
            "model.use_liger=false"
        )
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ValueError(
            "model.use_liger is true, which needs the package liger-kernel; install it with: pip install 'strop[liger]'"
        ) from error
    architecture = str(getattr(module.config, "model_type", ""))
    if architecture not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(
            f"model.use_liger is true, but liger-kernel has nothing for {architecture}; set model.use_liger=false, or "
            f"use one of {', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}"
        )
    apply_to_instance(module, MODEL_TYPE_TO_APPLY_LIGER_FN[architecture])


def apply_to_instance(module: nn.Module, apply: Callable[..., None]) -> None:
    """Call one of liger's functions, and take back what it did to classes that other models are made of."""
    namespace = vars(sys.modules[type(module).__module__])
    before = dict(namespace)
    parameters = inspect.signature(apply).parameters
    apply(model=module, **{name: on for name, on in _KERNELS.items() if name in parameters})
    kernel, original = namespace.get(_ROTARY), before.get(_ROTARY)
    namespace.update(before)
    if kernel is not original and not getattr(original, "is_shared_with_host", False):
        namespace[_ROTARY] = _shared_with_host(kernel, original)


def _shared_with_host(kernel: Any, original: Any) -> Any:
    """The kernel for tensors on a device, the original function for those in host memory."""

    def apply_rotary_pos_emb(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen = original if query.device.type == "cpu" else kernel
        return chosen(query, *args, **kwargs)

    apply_rotary_pos_emb.is_shared_with_host = True  # type: ignore[attr-defined]
    return apply_rotary_pos_emb
