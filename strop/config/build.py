"""Plain values by their full keys into nested frozen dataclasses, strictly typed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

from strop.config.errors import report
from strop.config.layers import Layers
from strop.config.schema import flat, join
from strop.config.sections import section_key
from strop.config.wrong_values import mismatch
from strop.utils.field_types import (
    field_hints,
    fits,
    is_mapping,
    is_section,
    nearest,
    union_members,
    without_bounds,
)

T = TypeVar("T")


def build_config(root: type[T], layers: Layers) -> T:
    """The configuration that the values of the layers stand for, over the defaults.

    Raises:
        ConfigError: something is wrong; all that was found is in it.
    """
    builder = _Builder(layers)
    config = builder.section(root(), "")
    if builder.problems:
        raise report(builder.problems)
    assert isinstance(config, root), "a tree without problems has been built"
    return config


def _with_place(sentence: str, key: str, origin: str) -> str:
    """The sentence of a section with the keys of its place: one that stands at several places, such as optim or
    model.lora, knows only the key that it was declared with."""
    if not key or not origin:
        return sentence
    return re.sub(rf"(?<![\w.]){re.escape(key)}\.(?=[a-z])", f"{origin}.", sentence)


class _Builder:
    """Builds sections bottom up and goes on after a problem, so that one load reports all of them. What a wrong value
    becomes is of no account: a section with one is not made."""

    def __init__(self, layers: Layers) -> None:
        self.values = dict(layers.values)
        self.origin, self.written = layers.origin, layers.written
        self.problems = list(layers.problems)

    def section(self, default: object, prefix: str) -> Any:
        """A section with what was given for the keys below `prefix`, and the values of `default` for the others; None
        where something in it was wrong."""
        cls: type = type(default)
        found_before = len(self.problems)
        fields = {}
        for name, hint in field_hints(cls).items():
            key, value = join(prefix, name), getattr(default, name)
            if is_section(hint):
                fields[name] = self.section(value, key)
            else:
                fields[name] = self._value(hint, self.values[key], key) if key in self.values else value
        if len(self.problems) > found_before:
            return None
        if all(value is getattr(default, name) for name, value in fields.items()):
            return default  # it was checked when it was made
        try:
            return cls(**fields)
        except ValueError as error:  # a rule of the dataclass itself: its sentence is the user's answer
            self.problems.append(_with_place(str(error), section_key(cls), prefix))
            return None

    def _value(self, hint: object, value: object, key: str) -> Any:
        """The value as the hint wants it: lists as tuples, whole numbers as floats, mappings of a list as sections."""
        if hint is Any:
            return self._plain(value, key)
        for part in union_members(hint):
            args = get_args(part)
            if is_section(part) and isinstance(value, Mapping):
                return self._entry(part, value, key)
            if is_mapping(part) and isinstance(value, Mapping):
                self._check_names(value, key)
                return {
                    name: self._value(args[1], entry, join(key, str(name))) for name, entry in value.items()
                }
            if get_origin(part) is tuple and isinstance(value, list | tuple):
                items = (args[0],) * len(value) if args[-1] is Ellipsis else args
                if len(items) == len(value):
                    each = enumerate(zip(items, value, strict=True))
                    return tuple(self._value(item, entry, f"{key}[{i}]") for i, (item, entry) in each)
        if not fits(hint, value):
            self.problems.append(self._mismatch(key, hint, value))
        elif type(value) is int and not any(
            fits(part, value) for part in union_members(hint) if without_bounds(part) is not float
        ):
            return float(value)
        return value

    def _mismatch(self, key: str, hint: object, value: object) -> str:
        return mismatch(key, hint, value, self.origin(key), self.written(key))

    def _entry(self, cls: type, values: Mapping[str, Any], key: str) -> Any:
        """A section in a list, whose keys are not among those of the tree."""
        for inner, value, hint in flat(cls, values, key):
            if hint is None:
                near = nearest(inner.rpartition(".")[2], field_hints(cls))
                keys = (
                    f"did you mean {near}?" if near else f"the keys there are {', '.join(field_hints(cls))}"
                )
                self.problems.append(f"unknown key {inner}{self.origin(inner)}; {keys}")
            self.values[inner] = value
        return self.section(cls(), key)

    def _plain(self, value: object, key: str) -> Any:
        """A copy of a free value, made of what YAML and JSON can hold."""
        if isinstance(value, Mapping):
            self._check_names(value, key)
            return {name: self._plain(part, join(key, str(name))) for name, part in value.items()}
        if isinstance(value, list):
            return [self._plain(part, f"{key}[{i}]") for i, part in enumerate(value)]
        is_nan = isinstance(value, float) and math.isnan(value)
        if is_nan or not isinstance(value, str | bool | int | float | None):
            self.problems.append(self._mismatch(key, Any, value))
        return value

    def _check_names(self, values: Mapping[Any, Any], key: str) -> None:
        for name in values:
            if not isinstance(name, str):
                self.problems.append(
                    f"{key} has the entry {name!r}{self.origin(key)}, but names are text: put it in quotes"
                )
