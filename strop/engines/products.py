"""Products of layers, by a library that is faster at them on this processor, where a guest knows one.

It joins at the place "products" (strop.base.guests).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from strop.base.guests import optional


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs [..., K] times weight [N, K] transposed, plus bias [N]: as `torch.nn.functional.linear`."""
    faster = optional("products")
    product: Tensor = (F if faster is None else faster).linear(inputs, weight, bias)
    return product


def layer_products(parameters: Iterable[nn.Parameter]) -> contextlib.AbstractContextManager[object]:
    """While it is entered, layers with these parameters multiply by `linear`."""
    faster = optional("products")
    found: contextlib.AbstractContextManager[object] = (
        contextlib.nullcontext() if faster is None else faster.layer_products(parameters)
    )
    return found
