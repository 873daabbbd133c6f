"""Arguments of a call against the schema that the prompt shows, for tools of every kind.

What the model writes has any form. A tool is called only with what it has declared; everything else is answered with a
sentence that says what is wrong, so that the model can mend it.

Read are the words of JSON schema that describe form: type, nullable, enum, const, properties, required,
additionalProperties, items, prefixItems, anyOf, oneOf, allOf and $ref within the schema. Patterns and ranges are left
to the tool. Schemas may come from a server: one that refers to itself, or is huge, costs a bounded number of steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strop.utils.sanitize.values import is_deeper

MAX_STEPS = 50_000
"""Pairs of a value and a schema that are looked at for one call."""
MAX_DEPTH = 64
"""Levels of objects and arrays in arguments."""
_MAX_TOLD = 3
_OPEN = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "if")
"""Words by which a schema may declare names elsewhere than in its properties."""

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
}


def wrong_arguments(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call; empty when nothing is.

    Names at the top that the schema does not declare are refused, unless it says additionalProperties or declares none.

    Args:
        arguments: as read from JSON.
        parameters: schema of the object that they make up.
    """
    if is_deeper(arguments, MAX_DEPTH):
        return f"they have more than {MAX_DEPTH} levels"
    check = _Check(parameters)
    known = parameters.get("properties") or {}
    is_closed = parameters.get("additionalProperties", not known) is False
    if is_closed and not any(word in parameters for word in _OPEN):
        names = ", ".join(f"'{one}'" for one in known) or "none"
        check.problems += [
            f"there is no argument {_shown(name)} (there are: {names})"
            for name in arguments
            if name not in known
        ]
    try:
        check.value(dict(arguments), parameters, "")
    except _TooMuch:
        return "they are too large to be checked"
    told = check.problems[:_MAX_TOLD]
    more = len(check.problems) - len(told)
    return "; ".join([*told, *([f"and {more} more"] if more else [])])


class _TooMuch(Exception):
    """The bound on steps is reached."""


class _Check:
    """One call: what was found, and what it has cost."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._steps = 0
        self._open: set[tuple[int, int]] = set()
        self.problems: list[str] = []

    def value(self, value: Any, schema: Any, where: str) -> None:
        """Compare a value with a schema."""
        pair = (id(value), id(schema))
        if not isinstance(schema, Mapping) or pair in self._open:  # a schema that is only itself says nothing
            if schema is False:
                self.problems.append(f"{_name(where)} is not allowed")
            return
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooMuch
        self._open.add(pair)
        try:
            self._compare(value, schema, where)
        finally:
            self._open.discard(pair)

    def _compare(self, value: Any, schema: Mapping[str, Any], where: str) -> None:
        if value is None and schema.get("nullable") is True:
            return
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
        if kinds and all(kind in _TYPES for kind in kinds) and not any(_TYPES[kind](value) for kind in kinds):
            self.problems.append(f"{_name(where)} must be {' or '.join(kinds)}, but is {_shown(value)}")
            return
        if isinstance(value, float) and not math.isfinite(value):
            self.problems.append(f"{_name(where)} is {value}, which is no number")
            return
        allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(allowed, Sequence) and not any(_is_same(value, one) for one in allowed):
            shown = ", ".join(_shown(one) for one in allowed[:20])
            self.problems.append(f"{_name(where)} is {_shown(value)}; it must be one of {shown}")
            return
        self._combined(value, schema, where)
        if isinstance(value, dict):
            self._object(value, schema, where)
        elif isinstance(value, list):
            self._array(value, schema, where)

    def _combined(self, value: Any, schema: Mapping[str, Any], where: str) -> None:
        target = self._resolved(schema.get("$ref"))
        if target is not None:
            self.value(value, target, where)
        for one in _listed(schema.get("allOf")):
            self.value(value, one, where)
        for word in ("anyOf", "oneOf"):
            choices = _listed(schema.get(word))
            if choices and not any(self._fits(value, one, where) for one in choices):
                self.problems.append(
                    f"{_name(where)} is {_shown(value)}, which is none of the forms it may have"
                )

    def _fits(self, value: Any, schema: Any, where: str) -> bool:
        before, self.problems = self.problems, []
        self.value(value, schema, where)
        found, self.problems = self.problems, before
        return not found

    def _object(self, value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> None:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        rest = schema.get("additionalProperties")
        for name in _listed(schema.get("required")):
            if name not in value:
                self.problems.append(f"the argument {_shown(_path(where, str(name)))} is missing")
        for name, item in value.items():
            inside = _path(where, name)
            if name in properties:
                self.value(item, properties[name], inside)
            elif where and rest is False and not any(word in schema for word in _OPEN):
                self.problems.append(f"there is no argument {_shown(inside)}")
            elif isinstance(rest, Mapping):
                self.value(item, rest, inside)

    def _array(self, value: Sequence[Any], schema: Mapping[str, Any], where: str) -> None:
        first = _listed(schema.get("prefixItems"))
        for number, item in enumerate(value):
            each = first[number] if number < len(first) else schema.get("items")
            if isinstance(each, Mapping):
                self.value(item, each, f"{where}[{number}]")

    def _resolved(self, reference: Any) -> Any:
        """What `#/a/b` points at within the schema; None where it points elsewhere."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self._root
        for word in reference[1:].split("/")[1:]:
            key = word.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                return None
            found = found[key]
        return found


def _is_same(value: Any, allowed: Any) -> bool:
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(
        value == allowed
    )  # 1 is 1.0, not true


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _name(where: str) -> str:
    return f"the argument {_shown(where)}" if where else "the object of arguments"


def _shown(value: Any) -> str:
    """A value in a sentence, short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        return f"'{value[:60]}'" + ("…" if len(value) > 60 else "")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return "a very large number"
    return json.dumps(value, default=repr)[:60]
