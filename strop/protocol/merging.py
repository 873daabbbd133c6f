"""Columns and facts by name: chosen, and what becomes of two of the same name: the same, joined, or an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strop.protocol.columns import BatchError, same_column

METRICS = "metrics"
"""Key of meta_info whose values `concat` gathers from all parts instead of comparing them."""


def object_array(items: Sequence[Any]) -> NDArray[Any]:
    """A 1-D object array; items of equal length stay items and do not become a second axis."""
    return np.fromiter(items, dtype=object, count=len(items))


def same(left: object, right: object) -> bool:
    """Deep equality of plain data, arrays and tensors, with NaN equal to NaN."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same_column(left, right)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return _same_array(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor | np.ndarray) or isinstance(right, torch.Tensor | np.ndarray):
        return False
    return bool(left == right) or bool(left != left and right != right)


def _same_array(left: NDArray[Any], right: NDArray[Any]) -> bool:
    if left.shape != right.shape:
        return False
    if left.dtype != object and right.dtype != object:
        return bool(((left == right) | ((left != left) & (right != right))).all())
    return all(map(same, left.ravel().tolist(), right.ravel().tolist()))


def merged_meta_info(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of both sides of a union; a fact with two values is an error, and metrics of both are joined as in a
    concat."""
    merged = {**left, **right}
    for key in left.keys() & right.keys():
        if same(left[key], right[key]):
            continue
        if key == METRICS:
            merged[key] = _joined_metrics([left[key], right[key]])
        else:
            raise BatchError(
                f"Conflicting values for meta_info key {key!r} in a union: {left[key]!r} and {right[key]!r}; "
                f"meta_info holds facts about all rows, so keep one of them and pop the other"
            )
    return merged


def joined_meta_info(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of all parts of a concat.

    `metrics` of the parts (a dictionary, a list of them, None or absent) become one dictionary of lists.
    Another key may be absent from some parts, and must have one value in the others.
    """
    joined: dict[str, Any] = {}
    for number, part in enumerate(facts):
        for key, value in part.items():
            if key == METRICS:
                continue
            if key not in joined:
                joined[key] = value
            elif not same(joined[key], value):
                raise BatchError(
                    f"Conflicting values for meta_info key {key!r} in a concat: {joined[key]!r} before part "
                    f"{number}, {value!r} in it; put what differs per row into a column, what differs per "
                    f"worker into meta_info['{METRICS}']"
                )
    if metrics := _joined_metrics([part.get(METRICS) for part in facts]):
        joined[METRICS] = metrics
    return joined


def _joined_metrics(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Metrics of several parts (of each a dictionary, a list of them, or None), by name."""
    joined: dict[str, list[Any]] = {}
    for value in values:
        for record in [value] if isinstance(value, Mapping) else value or ():
            for name, number_or_list in record.items():
                joined.setdefault(name, []).append(number_or_list)
    return joined


def chosen(columns: Mapping[str, Any], names: Sequence[str] | None, kind: str) -> dict[str, Any]:
    """The entries of these names, in their order; None: all. An unknown name is a BatchError."""
    if names is None:
        return dict(columns)
    requested = [names] if isinstance(names, str) else list(names)
    for name in requested:
        if name not in columns:
            raise BatchError(f"{kind} has no {name!r}; it has {', '.join(sorted(columns)) or 'nothing'}")
    return {name: columns[name] for name in requested}


def check_same_columns(parts: Sequence[tuple[Collection[str], Collection[str]]]) -> None:
    """Refuse to join parts, of which each has tensor columns and other columns of these names, that differ."""
    first = [set(names) for names in parts[0]]
    for number, part in enumerate(parts):
        differing = sorted(
            {name for ours, theirs in zip(first, part, strict=True) for name in ours ^ set(theirs)}
        )
        if differing:
            raise BatchError(
                f"columns {differing} are in some parts of a concat only (part {number} differs from "
                f"part 0); select the same columns from each part"
            )
