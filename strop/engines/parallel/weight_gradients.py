"""Gradients of the weights of linear layers, computed after the backward pass that they belong to.

Backward, a linear layer y = x W^T is two products: dx = dy W, which the layers before it wait for, and dW = dy^T x,
which nobody waits for before the optimizer step. Here x and dy are kept, and dW is computed when it is asked for. All
other gradients (norms, biases, embeddings, the head, joint products of all experts) come with the backward pass, as
does dW where x has no gradient.

Source: Qi et al. 2023, arXiv:2401.10241, section 2 (backward passes in two parts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strop.engines.cpu_products import operands


@dataclass(frozen=True, kw_only=True)
class WeightProduct:
    """The product that gives the gradient of a weight for some tokens."""

    inputs: Tensor
    """[..., K]"""
    output_grads: Tensor
    """[..., N]"""
    weight: Tensor
    """[N, K], a parameter or a view of one; its values are not looked at."""

    def add(self) -> None:
        """Add the gradient to that of the parameter."""
        grad = self.output_grads.flatten(0, -2).T @ self.inputs.flatten(0, -2)
        torch.autograd.backward(self.weight, grad)


class WeightGradients(TorchFunctionMode):
    """Products for the weights of linear layers, kept while backward passes run."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Leave the gradients of weights out of the backward passes of these modules, from now on.

        Args:
            layers: all `torch.nn.functional.linear` in their forward passes is meant, also where these are run again
                (gradient checkpointing).
        """
        super().__init__()
        self._products: list[WeightProduct] = []
        for layer in layers:
            layer.forward = partial(self._run, layer.forward)

    def take(self) -> list[WeightProduct]:
        """Products of the backward passes since the last call."""
        products, self._products = self._products, []
        return products

    def clear(self) -> None:
        """Drop the products of passes that were broken off."""
        self._products = []

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with self:
            return forward(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Result of a function of torch."""
        kwargs = kwargs or {}
        if func is F.linear and torch.is_grad_enabled():
            inputs, weight, bias = operands(*args, **kwargs)
            if inputs.requires_grad and weight.requires_grad and inputs.dim() > 1:
                return _Linear.apply(inputs, weight, bias, self._keep)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)  # whose gradients come with the backward pass

    def _keep(self, product: WeightProduct) -> None:
        self._products.append(product)


class _Linear(torch.autograd.Function):
    """As `torch.nn.functional.linear`, with a gradient of inputs and bias."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, keep: Callable[[WeightProduct], None]
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.keep = keep
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        inputs, weight = ctx.saved_tensors
        ctx.keep(WeightProduct(inputs=inputs.detach(), output_grads=grad, weight=weight))
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight, None, of_bias, None
