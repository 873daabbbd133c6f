"""What a tree of configuration dataclasses may hold: its keys, their types and defaults.

A field is one of: int, float, bool, str, a Literal, a union of these with None, tuple[X, ...], tuple[X, Y],
dict[str, X] (free: its keys are the user's), or another dataclass (a section), which may be `| None`.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from strop.base.guests import all_joined

SCALARS = (bool, int, float, str)


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One field of a configuration dataclass, with its annotation resolved."""

    name: str
    """The field's name: the last part of its key."""
    hint: Any
    """The resolved annotation."""
    required: bool
    """True where the field has no default of its own; a section made by its class alone has none either."""
    section: type | None
    """The dataclass below this key, or None for a value."""
    can_be_none: bool
    """True where null is a value of the field."""
    is_free: bool
    """True for a dict whose keys are the user's."""
    field: dataclasses.Field[Any]
    """The field itself, for its default."""

    def default(self) -> Any:
        """The default value; only for a field that is not required."""
        if self.field.default_factory is not MISSING:
            return self.field.default_factory()
        return self.field.default


@cache
def field_specs(cls: type) -> dict[str, FieldSpec]:
    """The fields of a configuration dataclass by name, in their order.

    Raises:
        TypeError: a field's annotation is not one that a configuration can hold.
    """
    hints = get_type_hints(cls)
    specs = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint = hints[field.name]
        if not _is_supported(hint):
            raise TypeError(f"{cls.__name__}.{field.name}: a configuration cannot hold the type {hint!r}")
        members = union_members(hint)
        sections = [member for member in members if is_section(member)]
        is_class_alone = type(None) not in members and any(s is field.default_factory for s in sections)
        specs[field.name] = FieldSpec(
            name=field.name,
            hint=hint,
            required=field.default is MISSING and (field.default_factory is MISSING or is_class_alone),
            section=sections[0] if sections else None,
            can_be_none=type(None) in members,
            is_free=any(is_mapping(member) for member in members),
            field=field,
        )
    return specs


def union_members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; the hint itself where it is none."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_section(hint: Any) -> bool:
    """True for a dataclass type."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def is_mapping(hint: Any) -> bool:
    """True for dict[str, X] and Mapping[str, X]."""
    return get_origin(hint) in (dict, Mapping)


def _is_supported(hint: Any) -> bool:
    members = union_members(hint)
    if len(members) > 1:
        alternatives = [member for member in members if member is not type(None)]
        nested = [member for member in alternatives if is_section(member) or is_mapping(member)]
        return all(map(_is_supported, alternatives)) and (not nested or len(alternatives) == 1)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return all(isinstance(arg, SCALARS) for arg in args)
    if origin is tuple:
        return all(_is_supported(arg) for arg in args if arg is not Ellipsis)
    if is_mapping(hint):
        return args[0] is str and (args[1] is Any or _is_supported(args[1]))
    return hint in SCALARS or is_section(hint)


IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
"""Types as an error message calls them."""


def type_name(hint: Any, *, words: Mapping[Any, str] = types.MappingProxyType({})) -> str:
    """The type as the reference page writes it; with `IN_WORDS`, in the words of an error message."""

    def name(part: Any) -> str:
        return type_name(part, words=words)

    members = union_members(hint)
    if len(members) > 1:
        return " or ".join(map(name, members))
    if hint in words:
        return words[hint]
    origin, args = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "null"
    if hint is Any:
        return "any value"
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is tuple and args[-1] is Ellipsis:
        return f"list, each entry {name(args[0])}" if words else f"list of {name(args[0])}"
    if origin is tuple:
        return f"list of {len(args)}: {', '.join(map(name, args))}"
    if is_mapping(hint):
        return f"mapping of names to {name(args[1])}"
    return "section" if is_section(hint) else str(hint.__name__)


def all_keys(root: type, prefix: str = "") -> list[str]:
    """Every full key of the tree, sections included, in the order of the fields."""
    keys = []
    for spec in field_specs(root).values():
        key = join(prefix, spec.name)
        keys.append(key)
        if spec.section is not None:
            keys.extend(all_keys(spec.section, key))
    return keys


def join(prefix: str, name: str) -> str:
    """The full key of a name below a prefix."""
    return f"{prefix}.{name}" if prefix else name


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a full key leads."""

    sections: tuple[str, ...]
    """The names of the sections on the way, from the top."""
    spec: FieldSpec
    """The field it reaches."""
    entry: tuple[str, ...]
    """What remains of the key inside a free dict; empty for the field itself."""


def locate(root: type, key: str) -> Location:
    """Follow a full key down the tree.

    Raises:
        ValueError: the tree has no such key; the message names the nearest one.
    """
    parts = key.split(".")
    cls: type = root
    for depth, part in enumerate(parts):
        spec = field_specs(cls).get(part)
        if spec is None:
            break
        if depth == len(parts) - 1 or spec.is_free:
            return Location(sections=tuple(parts[:depth]), spec=spec, entry=tuple(parts[depth + 1 :]))
        if spec.section is None:
            here = ".".join(parts[: depth + 1])
            raise ValueError(
                f"unknown key {key}: {here} is a value ({type_name(spec.hint)}) without keys of its own"
            )
        cls = spec.section
    raise ValueError(unknown_key(root, key, ""))


def default_at(root: type, location: Location) -> Any:
    """The default of a field where it stands in the tree; MISSING where it has none.

    A section's own default, if it has one, decides over the defaults of its class.
    """
    base: Any = None
    cls = root
    for name in location.sections:
        spec = field_specs(cls)[name]
        base = section_default(spec, base)
        assert spec.section is not None, "a location's way leads through sections"
        cls = spec.section
    if base is not None:
        return getattr(base, location.spec.name)
    return MISSING if location.spec.required else location.spec.default()


def section_default(spec: FieldSpec, parent: Any) -> Any:
    """The default object of a section, taken from `parent`'s default object where that exists; else None."""
    if parent is not None:
        return getattr(parent, spec.name)
    return None if spec.required else spec.default()


def nearest(key: str, keys: Iterable[str]) -> str | None:
    """The key a user most likely meant, or None where nothing resembles it.

    Two ways to miss are covered: a slip in spelling, and the right name under the wrong section.
    """
    best, best_score = None, 0.0
    name = key.rpartition(".")[2]
    for candidate in keys:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        last = difflib.SequenceMatcher(None, name, candidate.rpartition(".")[2]).ratio()
        if (whole >= 0.7 or last >= 0.8) and whole + last > best_score:
            best, best_score = candidate, whole + last
    return best


def unknown_key(root: type, key: str, origin: str) -> str:
    """The message for a key that the tree does not have."""
    keys = list(all_keys(root))
    of_this_name = [full for full in keys if full.rpartition(".")[2] == key.rpartition(".")[2]]
    if len(of_this_name) != 1:
        for translate in all_joined("key translation").values():
            ours, sentence = translate(key)
            if ours and set(ours) <= set(keys):
                return f"unknown key {key}{origin}; {sentence}"
    if len(of_this_name) > 1 and "." not in key:
        return f"unknown key {key}{origin}; the keys of this name are {', '.join(of_this_name)}"
    near = nearest(key, keys)
    if near is not None:
        return f"unknown key {key}{origin}; the nearest valid key is {near}"
    section, prefix = root, ""
    for part in key.split(".")[:-1]:
        spec = field_specs(section).get(part)
        if spec is None or spec.section is None:
            break
        section, prefix = spec.section, join(prefix, part)
    where = prefix or "the top level"
    return f"unknown key {key}{origin}; {where} has the keys {', '.join(field_specs(section))}"
