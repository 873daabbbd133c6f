"""Plain data as JSON that reads back equal: tuples and non-finite numbers are tagged, the rest is refused.

JSON has no tuple, NaN or infinity. They are written as an object with one key, `$tuple` or `$float`; an
object of the data that has such a key itself is written under `$dict`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from strop.protocol.columns import BatchError

_TAGS = ("$tuple", "$float", "$dict")


def to_json(value: Any, place: str) -> Any:
    """The JSON form of a value; a numpy number becomes the Python number.

    Raises:
        BatchError: a part of the value has no JSON form; the message says where it is, from `place` on.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list):
        return [to_json(item, f"{place}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [to_json(item, f"{place}[{number}]") for number, item in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        plain = {key: to_json(item, f"{place}[{key!r}]") for key, item in value.items()}
        return {"$dict": plain} if any(tag in plain for tag in _TAGS) else plain
    kind = "dictionary with keys that are no strings" if isinstance(value, Mapping) else type(value).__name__
    raise BatchError(
        f"{place} is a {kind}, which has no JSON form; make it of numbers, strings, lists and dictionaries "
        f"with string keys, put it into a tensor column, or pop it before saving"
    )


def from_json(value: Any) -> Any:
    """The value that `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1:
            (tag, content), *_ = value.items()
            if tag == "$tuple":
                return tuple(from_json(item) for item in content)
            if tag == "$float":
                return float(content)
            if tag == "$dict":
                return {key: from_json(item) for key, item in content.items()}
        return {key: from_json(item) for key, item in value.items()}
    return value
