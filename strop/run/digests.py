"""Digests of the results of a step's stages, exact to the bit."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Digestible = NDArray[Any] | str | bytes | int | float | Sequence[int] | Sequence[str]


def digest(*parts: Digestible) -> str:
    """sha256 over arrays and plain values, exact to the bit.

    Each part enters with its type and size, so ("ab", "c") and ("a", "bc") differ, and so do a float32 and
    a float64 zero, or 0.0 and -0.0. Arrays enter with dtype and shape, in C order, without a copy when
    they already lie so. A bfloat16 tensor comes as a view of its bits (int16).

    Raises:
        TypeError: a part of another type, or an array of objects.
    """
    hasher = hashlib.sha256()
    for part in parts:
        _update(hasher, part)
    return hasher.hexdigest()


def _update(hasher: hashlib._Hash, part: Digestible) -> None:
    if isinstance(part, np.ndarray):
        if part.dtype.hasobject:
            raise TypeError("an array of objects has no bytes to hash; convert it to numbers or strings")
        hasher.update(f"array {part.dtype.str} {part.shape}\n".encode())
        hasher.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    elif isinstance(part, (str, bytes)):
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(f"{type(part).__name__} {len(content)}\n".encode())
        hasher.update(content)
    elif isinstance(part, (bool, int)):
        hasher.update(f"int {int(part)}\n".encode())
    elif isinstance(part, float):
        hasher.update(b"float " + struct.pack("<d", part))
    elif isinstance(part, Sequence):
        hasher.update(f"list {len(part)}\n".encode())
        for item in part:
            _update(hasher, item)
    else:
        raise TypeError(f"cannot hash a {type(part).__name__}; give arrays, strings, bytes or numbers")
