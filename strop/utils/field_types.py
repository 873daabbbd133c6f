"""Types of configuration fields: their annotations, the check of a value, and both in words.

A field is one of: int, float, bool, str, a Literal, a union of these with None, tuple[X, ...], tuple[X, Y],
dict[str, X] (free: its keys are the user's), or another dataclass (a section). Bounds stand in the annotation:
`Annotated[float, Gt(0), Le(1)]` is a number above 0 and at most 1. A text among them is the reason that an error gives.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen

FiniteFloat = Annotated[float, Gt(-math.inf), Lt(math.inf)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(math.inf)]
PositiveFloat = Annotated[float, Gt(0), Lt(math.inf)]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveInt = Annotated[int, Ge(1)]
NonEmptyText = Annotated[str, MinLen(1)]

_WORDS: Mapping[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", Any: "any value",
    type(None): "null", Ge: "of at least", Gt: "above", Le: "of at most", Lt: "below", MinLen: "that is not empty",
}  # fmt: skip
_HOLDS = {Ge: operator.ge, Gt: operator.gt, Le: operator.le, Lt: operator.lt}


@cache
def field_hints(cls: type) -> dict[str, Any]:
    """The fields of a configuration dataclass in their order, each with its annotation, resolved."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@cache
def union_members(hint: object) -> tuple[Any, ...]:
    """The alternatives of a union; the hint itself where it is none."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def without_bounds(hint: Any) -> Any:
    """The type alone."""
    return hint.__origin__ if get_origin(hint) is Annotated else hint


def is_section(hint: object) -> TypeGuard[type]:
    """True for a dataclass type."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def is_mapping(hint: object) -> bool:
    """True for dict[str, X]."""
    return get_origin(hint) is dict


def literals(hint: object) -> Iterator[Any]:
    """The words of a closed list."""
    for member in union_members(hint):
        if get_origin(member) is Literal:
            yield from get_args(member)


def fits(hint: Any, value: Any) -> bool:
    """True if a value is of the type, strictly (neither "1" nor True is a number; 1 is also a float), and in bounds.
    NaN fits nothing: it is no setting, and no two of them are equal."""
    return _test_of(hint)(value)


@cache
def _test_of(hint: Any) -> Callable[[Any], bool]:
    """The test of `fits` for a type: thousands of values are tested for one configuration."""
    members, origin, args = union_members(hint), get_origin(hint), get_args(hint)
    if len(members) > 1:
        tests = [_test_of(member) for member in members]
        return lambda value: any(test(value) for test in tests)
    if origin is Annotated:
        return _test_of_bounds(_test_of(hint.__origin__), hint.__metadata__)
    if origin is Literal:
        return lambda value: any(type(value) is type(choice) and value == choice for choice in args)
    if origin is tuple and args[-1] is Ellipsis:
        each = _test_of(args[0])
        return lambda value: isinstance(value, tuple) and all(map(each, value))
    if origin is tuple:
        return lambda value: (
            isinstance(value, tuple) and len(value) == len(args) and all(map(fits, args, value))
        )
    if is_mapping(hint):
        item = _test_of(args[1])
        return lambda value: (
            isinstance(value, Mapping) and all(isinstance(k, str) and item(v) for k, v in value.items())
        )
    if hint is float:
        return lambda value: type(value) is int or (type(value) is float and not math.isnan(value))
    if hint is Any:
        return lambda value: True
    return (
        (lambda value: isinstance(value, hint)) if is_section(hint) else (lambda value: type(value) is hint)
    )


def _test_of_bounds(fits_type: Callable[[Any], bool], metadata: Iterable[Any]) -> Callable[[Any], bool]:
    least = max((bound.min_length for bound in metadata if isinstance(bound, MinLen)), default=0)
    bounds = [
        (_HOLDS[type(bound)], _limit(bound)) for bound in metadata if not isinstance(bound, str | MinLen)
    ]
    return lambda value: (
        fits_type(value)
        and (not least or len(value) >= least)
        and all(holds(value, limit) for holds, limit in bounds)
    )


def _limit(bound: object) -> Any:
    """The number in Ge(ge=1), Gt(gt=1), Le(le=1), Lt(lt=1)."""
    return getattr(bound, type(bound).__name__.lower())


def type_name(hint: object) -> str:
    """The type in words, with its bounds: `a number above 0 and at most 1`."""
    members, origin, args = union_members(hint), get_origin(hint), get_args(hint)
    if len(members) > 1:
        is_nested = any(is_mapping(member) or get_origin(member) is tuple for member in members)
        return ("; or " if is_nested else " or ").join(map(type_name, members))
    if origin is Annotated:
        return _bounded_name(hint)
    if origin is Literal:
        return "one of " + ", ".join('""' if word == "" else str(word) for word in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"list, each entry {type_name(args[0])}"
    if origin is tuple:
        return f"list of {len(args)}: {', '.join(map(type_name, args))}"
    if is_mapping(hint):
        return f"mapping of names to {type_name(args[1])}"
    return "section" if is_section(hint) else _WORDS.get(hint, str(hint))


def _bounded_name(hint: Any) -> str:
    """The name of a type with bounds; where one is infinity, it is called finite."""
    name, bounds = _WORDS[hint.__origin__], [bound for bound in hint.__metadata__ if type(bound) in _HOLDS]
    numbers = [f"{_WORDS[type(bound)]} {_limit(bound)}" for bound in bounds if not math.isinf(_limit(bound))]
    numbers += [_WORDS[MinLen] for bound in hint.__metadata__ if isinstance(bound, MinLen)]
    if any(math.isinf(_limit(bound)) for bound in bounds):
        name = name.replace("a ", "a finite ", 1)
    return f"{name} {' and '.join(numbers).replace('and of ', 'and ')}".strip()


_SAME_SECTION = 0.2
"""Bonus of a key in the same section: run.keep is run.keep_last sooner than algorithm.keep."""


def nearest(
    key: str, keys: Iterable[str], closeness: Callable[[str, str], float] | None = None
) -> str | None:
    """The key a user most likely meant, or None where nothing resembles it.

    Three ways to miss are covered: a slip in spelling, the right name under the wrong section, and a name that was not
    written to its end: samples is samples_per_prompt.

    Args:
        key: that was typed.
        keys: all that there are.
        closeness: resemblance of two keys, 0 where they are not alike; not given: that of names, where a dot need not
            part sections.
    """
    closeness = closeness or _closeness
    best, best_score = None, 0.0
    section, _, name = key.rpartition(".")
    keys = list(keys)
    begun = [full for full in keys if full.rpartition(".")[2].startswith(f"{name}_")]
    in_section = [full for full in begun if full.rpartition(".")[0] == section]
    if len({full.rpartition(".")[2] for full in begun}) > 1:
        begun = in_section
    if section and begun:
        return max(in_section or begun, key=lambda full: difflib.SequenceMatcher(None, key, full).ratio())
    for candidate in keys:
        if (score := closeness(key, candidate)) > best_score:
            best, best_score = candidate, score
    return best or next(iter(begun), None)


def _closeness(key: str, candidate: str) -> float:
    section, _, name = key.rpartition(".")
    whole = difflib.SequenceMatcher(None, key.lower(), candidate.lower()).ratio()
    last = difflib.SequenceMatcher(None, name.lower(), candidate.lower().rpartition(".")[2]).ratio()
    bonus = _SAME_SECTION if section and candidate.rpartition(".")[0] == section else 0.0
    return whole + last + bonus if whole >= 0.7 or last >= 0.8 else 0.0
