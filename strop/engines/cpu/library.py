"""The compiled functions of update.c, a library for each precision, and of products.c: made once for a machine, each in
about two seconds."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.utils.c_library import FUSED_SUMS, VECTORS, WIDE_VECTORS, c_library

SOURCE, PRODUCTS = (Path(__file__).with_name(name) for name in ("update.c", "products.c"))
TILES = Path(__file__).with_name("tiles.h")
"""Included in both."""
FLAGS = (
    "-O3", "-march=native", *WIDE_VECTORS, *FUSED_SUMS, "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC",
)  # fmt: skip
_DEFINED: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("-DBF16",)}
"""Precisions, and what update.c is told of each."""
_POINTER, _NUMBER, _REAL, _SMALL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_FUNCTIONS = {
    "attend": (_SMALL, [_POINTER] * 4 + [_NUMBER, _SMALL]),
    "attend_back": (_SMALL, [_POINTER] * 4 + [_NUMBER, _SMALL]),
    "lanes": (_NUMBER, []),
    "norm": (None, [_POINTER] * 4 + [_NUMBER] * 2 + [_REAL, _SMALL]),
    "norm_back": (None, [_POINTER] * 7 + [_NUMBER] * 2 + [_SMALL]),
    "norm_parts": (_NUMBER, [_NUMBER]),
    "turn": (
        None,
        [_POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER, _POINTER, *[_NUMBER] * 3, _SMALL, _SMALL],
    ),
    "gate": (None, [_POINTER] * 3 + [_NUMBER, _SMALL]),
    "gate_back": (None, [_POINTER] * 5 + [_NUMBER, _SMALL]),
}
"""Of update.c: kind of the result, and of the arguments."""
_PRODUCTS = {
    "lanes": (_NUMBER, []),
    "linear": (None, [_POINTER] * 4 + [_NUMBER] * 3 + [_SMALL]),
    "linear_back": (None, [_POINTER] * 3 + [_NUMBER] * 3 + [_SMALL]),
    "weight_gradient": (None, [_POINTER] * 3 + [_NUMBER] * 3 + [_SMALL] * 2),
    "feed_forward": (_SMALL, [_POINTER, _SMALL]),
    "feed_forward_back": (_SMALL, [_POINTER, _SMALL]),
    "sum_of_squares": (ctypes.c_double, [_POINTER, _NUMBER, _SMALL]),
}
"""The same of products.c."""


@cache
def update_library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL | None:
    """The functions for tensors of this precision; None where nothing can be compiled, or for another precision."""
    if dtype not in _DEFINED:
        return None
    return _library(SOURCE, _FUNCTIONS, _DEFINED[dtype])


@cache
def product_library() -> ctypes.CDLL | None:
    """Products and sums in float32; None where nothing can be compiled."""
    return _library(PRODUCTS, _PRODUCTS)


def _library(
    source: Path, functions: Mapping[str, tuple[Any, Any]], defined: tuple[str, ...] = ()
) -> ctypes.CDLL | None:
    path = c_library(source, flags=[*FLAGS, *defined], doing="training", included=[VECTORS, TILES])
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def library_for(*states: Tensor) -> ctypes.CDLL | None:
    """The functions of update.c, where they are for these tensors."""
    return update_library(states[0].dtype) if are_plain(*states) else None


def are_plain(*states: Tensor) -> bool:
    """True for plain tensors of one precision in host memory that nothing traces."""
    dtype = states[0].dtype
    for tensor in states:
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
        if not is_plain or tensor.dtype != dtype or tensor.device.type != "cpu":
            return False
    return not torch.compiler.is_compiling()
