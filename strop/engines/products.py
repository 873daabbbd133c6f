"""Products of matrices among the functions of torch, for modes that change or watch them (TorchFunctionMode)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PRODUCTS = (
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.einsum
)  # fmt: skip
"""Functions that multiply matrices, all of whose arguments that are tensors are factors. Linear maps are not among
them."""


def matrices(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Factors of a call of one of PRODUCTS, or of a linear map, by its arguments."""
    return list(_tensors([*args, *kwargs.values()]))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):  # einsum takes factors one by one or in a list
            yield from _tensors(value)
