"""Nested plain values into nested frozen dataclasses, strictly typed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from strop.config.errors import report
from strop.config.schema import (
    IN_WORDS,
    FieldSpec,
    all_keys,
    field_specs,
    is_mapping,
    is_section,
    join,
    nearest,
    section_default,
    type_name,
    union_members,
    unknown_key,
)

T = TypeVar("T")

_ABSENT = object()
_WRONG = object()


def build_config(
    root: type[T], values: Mapping[str, Any], *, origin: Callable[[str], str], problems: list[str]
) -> T:
    """The configuration that the values stand for, over the defaults.

    Args:
        root: the dataclass at the top.
        values: nested plain values.
        origin: ` (in my.yaml)` for a full key, or "".
        problems: what was found wrong before.

    Raises:
        ConfigError: something is wrong; all that was found is in it.
    """
    builder = _Builder(root, origin, problems)
    config = builder.section(root, values, None, "")
    if builder.problems:
        raise report(builder.problems)
    assert isinstance(config, root), "a tree without problems has been built"
    return config


class _MismatchError(Exception):
    """A value that does not fit its field."""


class _Builder:
    """Builds sections bottom up and goes on after a problem, so that one load reports all of them."""

    def __init__(self, root: type, origin: Callable[[str], str], problems: list[str]) -> None:
        self.root = root
        self.origin = origin
        self.problems = list(problems)

    def section(
        self, cls: type, values: Mapping[str, Any], base: Any, prefix: str, in_tree: bool = True
    ) -> Any:
        """An object of `cls`: `values` over `base` (the section's own default) or the class defaults.

        Returns _WRONG where something below was wrong; the problems say what. `in_tree` is False for the
        entries of lists and free dicts, whose keys are not among the full keys of the root.
        """
        found_before = len(self.problems)
        for name in values:
            if name not in field_specs(cls):
                self._unknown(cls, join(prefix, str(name)), in_tree)
        arguments = {}
        for spec in field_specs(cls).values():
            value = self._field(spec, values, base, join(prefix, spec.name), in_tree)
            if value is not _ABSENT:
                arguments[spec.name] = value
        if len(self.problems) > found_before:
            return _WRONG
        try:
            return cls(**arguments)
        except ValueError as error:  # a check of the dataclass itself: its sentence is the user's answer
            self.problems.append(str(error))
            return _WRONG

    def _field(self, spec: FieldSpec, values: Mapping[str, Any], base: Any, key: str, in_tree: bool) -> Any:
        """The value of one field; _ABSENT leaves it to the class default."""
        if spec.name in values:
            value = values[spec.name]
            if spec.section is not None and isinstance(value, Mapping):
                return self.section(spec.section, value, section_default(spec, base), key, in_tree)
            return self._value(spec.hint, value, key)
        if base is not None:
            return getattr(base, spec.name)
        if not spec.required:
            return _ABSENT
        if spec.section is not None and not spec.can_be_none:
            return self.section(spec.section, {}, None, key, in_tree)
        self.problems.append(f"{key} has no default: set it in the configuration file or as {key}=...")
        return _WRONG

    def _unknown(self, cls: type, key: str, in_tree: bool) -> None:
        if in_tree:
            self.problems.append(unknown_key(self.root, key, self.origin(key)))
            return
        near = nearest(key.rpartition(".")[2], all_keys(cls))
        known = f"did you mean {near}?" if near else f"the keys there are {', '.join(field_specs(cls))}"
        self.problems.append(f"unknown key {key}{self.origin(key)}; {known}")

    def _value(self, hint: Any, value: Any, key: str) -> Any:
        try:
            return self._convert(hint, value, key)
        except _MismatchError as mismatch:
            self.problems.append(str(mismatch))
            return _WRONG

    def _convert(self, hint: Any, value: Any, key: str) -> Any:
        """The value as the hint wants it."""
        members = union_members(hint)
        if len(members) > 1:
            return self._convert_union(hint, members, value, key)
        if hint is Any:
            return self._plain(value, key)
        if get_origin(hint) is Literal:
            if any(type(value) is type(choice) and value == choice for choice in get_args(hint)):
                return value
        elif get_origin(hint) is tuple:
            return self._list(hint, value, key)
        elif is_mapping(hint):
            return self._mapping(hint, value, key)
        elif is_section(hint):
            if isinstance(value, Mapping):
                return self.section(hint, value, None, key, in_tree=False)
        elif type(value) is hint and value == value:  # NaN is no setting, and no two of them are equal
            return value
        elif hint is float and type(value) is int:
            return float(value)
        raise _MismatchError(self._message(hint, value, key))

    def _convert_union(self, hint: Any, members: tuple[Any, ...], value: Any, key: str) -> Any:
        exact = [member for member in members if type(value) is member]
        nested = [member for member in members if is_section(member) or is_mapping(member)]
        if value is not None and nested:
            return self._convert(nested[0], value, key)
        for member in (*exact, *members):
            try:
                return self._convert(member, value, key)
            except _MismatchError:
                continue
        raise _MismatchError(self._message(hint, value, key))

    def _list(self, hint: Any, value: Any, key: str) -> tuple[Any, ...]:
        items = get_args(hint)
        if not isinstance(value, list | tuple):
            raise _MismatchError(
                self._message(hint, value, key) + f"; for a list of one, write {key}=[{value}]"
            )
        if items[-1] is Ellipsis:
            items = (items[0],) * len(value)
        elif len(items) != len(value):
            raise _MismatchError(self._message(hint, value, key))
        parts = enumerate(zip(items, value, strict=True))
        return tuple(self._value(item, part, f"{key}[{i}]") for i, (item, part) in parts)

    def _mapping(self, hint: Any, value: Any, key: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _MismatchError(self._message(hint, value, key))
        self._check_names(value, key)
        return {name: self._value(get_args(hint)[1], part, join(key, name)) for name, part in value.items()}

    def _plain(self, value: Any, key: str) -> Any:
        """A copy of a free value, made of what YAML and JSON can hold."""
        if isinstance(value, Mapping):
            self._check_names(value, key)
            return {name: self._plain(part, join(key, name)) for name, part in value.items()}
        if isinstance(value, list):
            return [self._plain(part, f"{key}[{i}]") for i, part in enumerate(value)]
        if (
            value is None
            or isinstance(value, str | bool | int)
            or (isinstance(value, float) and not math.isnan(value))
        ):
            return value
        raise _MismatchError(self._message(Any, value, key))

    def _check_names(self, value: Mapping[Any, Any], key: str) -> None:
        for name in value:
            if not isinstance(name, str):
                raise _MismatchError(
                    f"{key} has the entry {name!r}{self.origin(key)}, but names are text: put it in quotes"
                )

    def _message(self, hint: Any, value: Any, key: str) -> str:
        shown = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
        shown = "null" if value is None else shown
        text = f"{key} is {shown}{self.origin(key)}, but it needs {type_name(hint, words=IN_WORDS)}"
        return text + _way_out(union_members(hint), value, shown)


def _way_out(members: tuple[Any, ...], value: Any, shown: str) -> str:
    """What to write instead, where the value suggests it; else ""."""
    if str in members and isinstance(value, bool | int | float):
        return f"; to make it text, put it in quotes inside the quotes of the shell: '\"{shown}\"'"
    if int in members and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    choices = [
        str(choice) for member in members if get_origin(member) is Literal for choice in get_args(member)
    ]
    near = nearest(value, choices) if isinstance(value, str) else None
    return f"; did you mean {near}?" if near else ""
