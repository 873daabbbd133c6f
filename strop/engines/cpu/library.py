"""The compiled functions of update.c: a library for each precision, made once for a machine in about two seconds."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from strop.utils.c_library import WIDE_VECTORS, c_library

SOURCE = Path(__file__).with_name("update.c")
FLAGS = (
    "-O3", "-march=native", *WIDE_VECTORS, "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC",
)  # fmt: skip
_DEFINED: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("-DBF16",)}
"""Precisions, and what update.c is told of each."""
_POINTER, _NUMBER, _REAL, _SMALL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_FUNCTIONS = {
    "attend": (_SMALL, [_POINTER] * 4 + [_NUMBER, _SMALL]),
    "attend_back": (_SMALL, [_POINTER] * 4 + [_NUMBER, _SMALL]),
    "lanes": (_NUMBER, []),
    "norm": (None, [_POINTER] * 4 + [_NUMBER] * 2 + [_REAL, _SMALL]),
    "norm_back": (None, [_POINTER] * 6 + [_NUMBER] * 2 + [_SMALL]),
    "norm_parts": (_NUMBER, [_NUMBER]),
    "turn": (
        None,
        [_POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER, _POINTER, *[_NUMBER] * 3, _SMALL, _SMALL],
    ),
    "gate": (None, [_POINTER] * 3 + [_NUMBER, _SMALL]),
    "gate_back": (None, [_POINTER] * 5 + [_NUMBER, _SMALL]),
    "weight_gradient": (None, [_POINTER] * 3 + [_NUMBER] * 3 + [_SMALL]),
}
"""Kind of the result, and of the arguments."""


@cache
def update_library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL | None:
    """The functions for tensors of this precision; None where nothing can be compiled, or for another precision."""
    if dtype not in _DEFINED:
        return None
    path = c_library(SOURCE, flags=[*FLAGS, *_DEFINED[dtype]], doing="training")
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def library_for(*states: Tensor) -> ctypes.CDLL | None:
    """The functions, where they are for these tensors: plain ones of one precision in host memory that nothing
    traces."""
    dtype = states[0].dtype
    for tensor in states:
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
        if not is_plain or tensor.dtype != dtype or tensor.device.type != "cpu":
            return None
    return None if torch.compiler.is_compiling() else update_library(dtype)
