"""Validation of a call's arguments against the schema of the tool, for tools of every kind.

A model may write anything. A tool is called only with arguments that it has declared; all others are answered with a
sentence about the problem, so that the model can correct it.

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
_MAX_SENTENCES = 3
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
    """Problems of a call's arguments, in a sentence; empty when there is none.

    Names at the top that the schema does not declare are refused, unless it says additionalProperties or declares none.

    Args:
        arguments: as read from JSON.
        parameters: schema of the object that they make up.
    """
    if is_deeper(arguments, MAX_DEPTH):
        return f"they have more than {MAX_DEPTH} levels"
    check = _Check(parameters)
    properties = parameters.get("properties") or {}
    is_closed = parameters.get("additionalProperties", not properties) is False
    if is_closed and not any(word in parameters for word in _OPEN):
        names = ", ".join(f"'{property_name}'" for property_name in properties) or "none"
        check.problems += [
            f"there is no argument {_describe(name)} (there are: {names})"
            for name in arguments
            if name not in properties
        ]
    try:
        check.value(dict(arguments), parameters, "")
    except _TooManySteps:
        return "they are too large to be checked"
    sentences = check.problems[:_MAX_SENTENCES]
    more = len(check.problems) - len(sentences)
    return "; ".join([*sentences, *([f"and {more} more"] if more else [])])


class _TooManySteps(Exception):
    """The bound on steps is reached."""


class _Check:
    """Validation of one call: problems, and steps taken."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._steps = 0
        self._open: set[tuple[int, int]] = set()
        self.problems: list[str] = []

    def value(self, value: Any, schema: Any, path: str) -> None:
        """Compare a value with a schema."""
        pair = (id(value), id(schema))
        if not isinstance(schema, Mapping) or pair in self._open:  # a schema that is only itself says nothing
            if schema is False:
                self.problems.append(f"{_argument_name(path)} is not allowed")
            return
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooManySteps
        self._open.add(pair)
        try:
            self._compare(value, schema, path)
        finally:
            self._open.discard(pair)

    def _compare(self, value: object, schema: Mapping[str, Any], path: str) -> None:
        if value is None and schema.get("nullable") is True:
            return
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
        if kinds and all(kind in _TYPES for kind in kinds) and not any(_TYPES[kind](value) for kind in kinds):
            self.problems.append(
                f"{_argument_name(path)} must be {' or '.join(kinds)}, but is {_describe(value)}"
            )
            return
        if isinstance(value, float) and not math.isfinite(value):
            self.problems.append(f"{_argument_name(path)} is {value}, which is no number")
            return
        allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(allowed, Sequence) and not any(_is_same(value, choice) for choice in allowed):
            choices = ", ".join(_describe(choice) for choice in allowed[:20])
            self.problems.append(f"{_argument_name(path)} is {_describe(value)}; it must be one of {choices}")
            return
        self._check_subschemas(value, schema, path)
        if isinstance(value, dict):
            self._check_object(value, schema, path)
        elif isinstance(value, list):
            self._check_array(value, schema, path)

    def _check_subschemas(self, value: object, schema: Mapping[str, Any], path: str) -> None:
        target = self._resolve(schema.get("$ref"))
        if target is not None:
            self.value(value, target, path)
        for subschema in _listed(schema.get("allOf")):
            self.value(value, subschema, path)
        for word in ("anyOf", "oneOf"):
            choices = _listed(schema.get(word))
            if choices and not any(self._fits(value, subschema, path) for subschema in choices):
                self.problems.append(
                    f"{_argument_name(path)} is {_describe(value)}, which is none of the forms it may have"
                )

    def _fits(self, value: object, schema: object, path: str) -> bool:
        problems_before, self.problems = self.problems, []
        self.value(value, schema, path)
        problems, self.problems = self.problems, problems_before
        return not problems

    def _check_object(self, value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> None:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        rest = schema.get("additionalProperties")
        for name in _listed(schema.get("required")):
            if name not in value:
                self.problems.append(f"the argument {_describe(_join_path(path, str(name)))} is missing")
        for name, item in value.items():
            item_path = _join_path(path, name)
            if name in properties:
                self.value(item, properties[name], item_path)
            elif path and rest is False and not any(word in schema for word in _OPEN):
                self.problems.append(f"there is no argument {_describe(item_path)}")
            elif isinstance(rest, Mapping):
                self.value(item, rest, item_path)

    def _check_array(self, value: Sequence[Any], schema: Mapping[str, Any], path: str) -> None:
        first = _listed(schema.get("prefixItems"))
        for number, item in enumerate(value):
            item_schema = first[number] if number < len(first) else schema.get("items")
            if isinstance(item_schema, Mapping):
                self.value(item, item_schema, f"{path}[{number}]")

    def _resolve(self, reference: object) -> Any:
        """Target of `#/a/b` within the schema; None where it points elsewhere."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        target: Any = self._root
        for word in reference[1:].split("/")[1:]:
            key = word.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or key not in target:
                return None
            target = target[key]
        return target


def _is_same(value: object, allowed: object) -> bool:
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(
        value == allowed
    )  # 1 is 1.0, not true


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _argument_name(path: str) -> str:
    return f"the argument {_describe(path)}" if path else "the object of arguments"


def _describe(value: object) -> str:
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
