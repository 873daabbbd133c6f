"""Products of layers in float32, by oneDNN on processors where torch's first choice is slow at them.

torch multiplies by MKL, which uses half of an AMD processor with AVX-512; oneDNN, which torch brings for its compiler,
uses it (benchmarks/RESULTS.md). Small weights stay with torch, where a call costs more than the product. What is taken
depends on the weight alone: a token's numbers come from the same library, however many tokens are beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MIN_NUMBERS = 1 << 16
"""Of a weight."""
CPU_INFO = Path("/proc/cpuinfo")


@cache
def is_onednn_faster() -> bool:
    """True on a processor where it was seen."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch._C._has_mkldnn:
        return False
    try:
        return "AuthenticAMD" in CPU_INFO.read_text()
    except OSError:
        return False


def has_large(parameters: Iterable[nn.Parameter]) -> bool:
    """True if one of these is multiplied by oneDNN."""
    return any(_is_taken(parameter) for parameter in parameters)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs [..., K] times weight [N, K] transposed, plus bias [N]: as `torch.nn.functional.linear`."""
    is_plain = inputs.dtype == torch.float32 and inputs.numel() and not torch.is_autocast_enabled("cpu")
    if not is_plain or not _is_taken(weight):
        return F.linear(inputs, weight, bias)
    if not torch.is_grad_enabled():
        return _product(inputs, weight, bias)
    product: Tensor = _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return product


def _is_taken(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and weight.numel() >= MIN_NUMBERS
        and type(weight) in (Tensor, nn.Parameter)
        and is_onednn_faster()
    )


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        inputs, weight = ctx.saved_tensors
        rows, inputs_2d = grad.flatten(0, -2), inputs.flatten(0, -2)
        needs = ctx.needs_input_grad
        return (
            _product(rows, weight.T).view(inputs.shape) if needs[0] else None,
            _product(rows.T, inputs_2d.T) if needs[1] else None,
            rows.sum(0) if needs[2] else None,
        )


def layer_products(parameters: Iterable[nn.Parameter]) -> contextlib.AbstractContextManager[object]:
    """While it is entered, layers multiply by `linear`; nothing changes where none of their parameters is taken."""
    return LayerProducts() if has_large(parameters) else contextlib.nullcontext()


class LayerProducts(TorchFunctionMode):
    """While it is entered, layers multiply by `linear`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Result of a function of torch."""
        return (linear if func is F.linear else func)(*args, **(kwargs or {}))
