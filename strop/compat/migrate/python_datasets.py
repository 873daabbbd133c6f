"""Data sets of a Python script that trains with TRL: where they are loaded from, and the steps that follow."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from strop.compat.migrate.python_names import LONGEST_CHAIN, ScriptNames, last_name

_JOINED = ("concatenate_datasets", "interleave_datasets")


def read_dataset(node: ast.expr, names: ScriptNames) -> dict[str, Any] | None:
    """The data set that an expression stands for, or several that are one; None where that cannot be told.

    Args:
        node: the expression.
        names: of its script.

    Returns:
        The literal arguments of load_dataset(...) and the names of the `steps` that its rows go through afterwards;
        of several sets such `parts`, and the `shares` they are drawn with.
    """
    names.end_call()
    dataset = _dataset(node, names)
    names.end_call()
    return dataset


def is_of_flags(node: ast.expr, names: ScriptNames) -> bool:
    """The rows are a split of the data set that the flags of the script name, as in the scripts of TRL:
    load_dataset(script_args.dataset_name)[script_args.dataset_train_split], under a condition or not."""
    node = names.resolved(node)
    if isinstance(node, ast.IfExp):
        return is_of_flags(node.body, names)
    if not isinstance(node, ast.Subscript):
        return False
    match names.resolved(node.value):
        case ast.Call(func=function, args=[ast.Attribute(attr="dataset_name"), *_]):
            return last_name(function) == "load_dataset"
    return False


def _dataset(node: ast.expr, names: ScriptNames) -> dict[str, Any] | None:
    steps: list[str] = []
    chosen = None  # of the splits that are loaded together
    for _ in range(LONGEST_CHAIN):
        node = names.resolved(node)
        match node:
            case ast.Subscript(value=inner, slice=which):
                node, chosen = inner, names.text(which) or chosen
            case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method != "load_dataset":
                steps.insert(0, method)
                node, chosen = inner, None if method == "train_test_split" else chosen
            case ast.Call() if last_name(node.func) == "load_dataset":
                break
            case ast.Call(args=[parts, *_]) if last_name(node.func) in (*_JOINED, "get_dataset"):
                return _merged(node, parts, steps, names)
            case ast.Call(func=ast.Name(id=called)) if called in names.functions:
                returned = names.returned(called, node)
                if returned is None:
                    return None
                node = returned
            case _:
                return None
    if not isinstance(node, ast.Call):
        return None
    try:
        positional = [names.literal(argument) for argument in node.args]
        keywords = {
            keyword.arg: names.literal(keyword.value)
            for keyword in node.keywords
            if keyword.arg in ("path", "name", "data_files", "split")
        }
    except ValueError:
        return None
    arguments = {**dict(zip(("path", "name"), positional, strict=False)), **keywords}
    return {
        "path": arguments.get("path"),
        "name": arguments.get("name"),
        "data_files": arguments.get("data_files"),
        "split": arguments.get("split") or chosen,
        "steps": steps,
    }


def _merged(
    node: ast.Call, parts: ast.expr, steps: Sequence[str], names: ScriptNames
) -> dict[str, Any] | None:
    """Several data sets in one: put one behind the other, or drawn from with probabilities; None for others."""
    parts = names.resolved(parts)
    if isinstance(parts, ast.Call) and last_name(parts.func) == "DatasetMixtureConfig":
        datasets = [entry.value for entry in parts.keywords if entry.arg == "datasets"] or parts.args[:1]
        parts = names.resolved(datasets[0]) if datasets else parts
    if not isinstance(parts, ast.List | ast.Tuple):
        return None
    sets = [_part(names.resolved(part), names) for part in parts.elts]
    if any(entry is None or "parts" in entry for entry in sets):
        return None
    parts_with_steps = [{**entry, "steps": [*entry["steps"], *steps]} for entry in sets if entry is not None]
    if last_name(node.func) != "interleave_datasets":
        return {"parts": parts_with_steps}
    probabilities = [entry.value for entry in node.keywords if entry.arg == "probabilities"] or node.args[1:2]
    try:
        shares = names.literal(probabilities[0]) if probabilities else None
    except ValueError:
        return None
    return {"parts": parts_with_steps, "shares": list(shares or [1.0] * len(parts_with_steps))}


def _part(node: ast.expr, names: ScriptNames) -> dict[str, Any] | None:
    """One of several data sets: as another one, or TRL's DatasetConfig(path=..., ...)."""
    if not isinstance(node, ast.Call) or last_name(node.func) != "DatasetConfig":
        return _dataset(node, names)
    keys = ("path", "name", "data_dir", "data_files", "split")
    try:
        arguments = dict(zip(keys, (names.literal(entry) for entry in node.args), strict=False))
        arguments |= {entry.arg: names.literal(entry.value) for entry in node.keywords if entry.arg in keys}
    except ValueError:
        return None
    return {"name": None, "data_files": None, "split": "train", **arguments, "steps": []}
