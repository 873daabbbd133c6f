"""Plain JSON of our own state, which has to come back as it was. What comes from outside passes `strop.border`."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any


def jsonable(value: object, where: str) -> Any:
    """`value` as plain JSON types: tuples become lists, NumPy numbers become Python numbers.

    JSON has no NaN and no infinity, and many readers refuse the words Python writes for them, so these
    floats become the strings "nan", "inf" and "-inf".

    Args:
        value: numbers, strings, None, mappings with string keys and sequences of these.
        where: what the value is, for the error.

    Raises:
        TypeError: a value or key of another type; the message holds the path to it.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}, but JSON keys are strings")
        return {key: jsonable(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [jsonable(item, f"{where}[{position}]") for position, item in enumerate(value)]
    scalar = getattr(value, "tolist", None)  # NumPy arrays, and numpy.bool_, which is no number
    if callable(scalar):
        return jsonable(scalar(), where)
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold; convert it first")


def canonical_json(value: object) -> bytes:
    """One text per JSON value: sorted keys, no spaces. Hashes are taken over it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")
