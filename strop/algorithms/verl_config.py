"""Settings and calls in verl's convention: the config object, and arguments by the names of parameters."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from strop.algorithms.config import AlgorithmConfig
from strop.utils.registry import dotted, required_parameters


class VerlConfig(Mapping[str, Any]):
    """Settings as verl's functions read them: `config.clip_ratio`, `config["clip_ratio"]`, `config.get(...)`.

    Nested mappings are of this class too. It cannot be written to.
    """

    _values: Mapping[str, Any]

    def __init__(self, values: Mapping[str, object]) -> None:
        self.__dict__["_values"] = {
            key: VerlConfig(value) if isinstance(value, Mapping) else value for key, value in values.items()
        }

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __getattr__(self, name: str) -> Any:
        values: Mapping[str, Any] = self.__dict__.get("_values", {})  # none while a copy is being made
        if name in values:
            return values[name]
        near = difflib.get_close_matches(name, values, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise AttributeError(f"this config has no {name}{hint} It has {', '.join(sorted(values))}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"this config cannot be changed: {name} was set to {value!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"VerlConfig({dict(self)})"


def algorithm_fields(algorithm: AlgorithmConfig) -> dict[str, object]:
    """The settings by name, sections as mappings."""
    return {
        field.name: dataclasses.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
        else value
        for field in dataclasses.fields(algorithm)
        for value in [getattr(algorithm, field.name)]
    }


def parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Parameters of the function by name."""
    return inspect.signature(function).parameters


def takes(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    """A function with these parameters takes an argument of this name."""
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def call_with_known(
    function: Callable[..., object],
    parameters: Mapping[str, inspect.Parameter],
    offered: Mapping[str, object],
) -> object:
    """The function's result, given by keyword what it takes of what there is; None is given only where there is a
    parameter of that name."""
    missing = [name for name in required_parameters(function) if name not in offered]
    if missing:
        raise ValueError(
            f"{dotted(function)} requires {', '.join(missing)}, which nobody gives it: verl's convention has "
            f"{', '.join(offered)}. Give the parameter a default, or declare columns with needs=[...]"
        )
    arguments = {
        name: value
        for name, value in offered.items()
        if name in parameters or (value is not None and takes(parameters, name))
    }
    return function(**arguments)
