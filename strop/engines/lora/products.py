"""Forward pass of a linear layer with an adapter: the adapter's part is added into the layer's output, in place.

PEFT makes three tensors of the size of the output beside it (B A x, the same times its factor, the sum), and their
gradients; in half precision it widens the hidden states first, so that each adapter keeps rounded ones of its own. The
three are freed at once, but on a CPU what the backward pass keeps lies between them, so that the heap of the C library
is left with gaps of their size: benchmarks/RESULTS.md has the memory of both.

Except on a CPU in half precision the product with B is no `torch.nn.functional.linear` any more, so what takes the
place of that function does not see it: the gradient by B comes with the backward pass (parallel/weight_gradients.py),
and torch multiplies (cpu_products.py).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from strop.engines.cpu_products import with_zeros


def add_in_place(layer: Any) -> None:
    """Let the only adapter of a layer (`peft.tuners.lora.Linear`), a plain one without dropout, be added so."""
    if type(layer.get_base_layer()) is nn.Linear:
        layer.forward = MethodType(_forward, layer)


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    """W x + b + factor * B A x for hidden states x [..., K]: [..., N]."""
    (adapter,) = layer.active_adapters
    inner, outer = layer.lora_A[adapter], layer.lora_B[adapter]
    if layer.disable_adapters or layer.merged or not _is_plain(outer, hidden):
        output: Tensor = type(layer).forward(layer, hidden)
        return output
    rows, factor = hidden.flatten(0, -2), layer.scaling[adapter]
    is_computed_here = hidden.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_computed_here and not torch.is_grad_enabled():  # a compiler would make a function for few rows
        rows = with_zeros(rows)
    product: Tensor = layer.base_layer(rows)
    if is_computed_here and torch.is_autocast_enabled("cpu"):
        product.add_(outer(inner(rows)), alpha=factor)  # torch itself may be slow at products of bfloat16
    else:
        product.addmm_(inner(rows), outer.weight.to(product.dtype).T, alpha=factor)
    return product[: hidden.shape[:-1].numel()].view(*hidden.shape[:-1], product.shape[1])


def _is_plain(outer: nn.Module, hidden: Tensor) -> bool:
    """The second matrix of an adapter is whole, which it is in a trace too, and of the precision of the hidden states,
    which are rows, but where autocast gives both another one."""
    if type(outer) is not nn.Linear or hidden.dim() < 2:
        return False
    weight = outer.weight
    is_alike = weight.dtype == hidden.dtype or torch.is_autocast_enabled(hidden.device.type)
    return type(weight) in (Tensor, nn.Parameter, FakeTensor) and is_alike
