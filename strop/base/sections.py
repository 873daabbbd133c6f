"""Sections of the configuration that belong to guests: fields that a section of the core gets as its class is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

from strop.base.field_types import field_hints, fits, mismatch
from strop.base.guests import joined, targets
from strop.base.trust import Named

C = TypeVar("C", bound=type[Any])
S = TypeVar("S")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(key: str) -> Callable[[C], C]:
    """Class decorator: a frozen dataclass with a field for every section that a guest declares right below `key`.

    Args:
        key: full key of the section in the root configuration; "" for the root itself.

    What is made refuses values that do not fit their fields, bounds included (strop.base.field_types), before its own
    `__post_init__` looks at several of them together.
    """

    def make(cls: C) -> C:
        for full in targets("section"):
            parent, _, name = full.rpartition(".")
            if parent == key:
                below = joined("section", full)
                cls.__annotations__[name] = below
                setattr(cls, name, field(default_factory=below))
        check_rules = getattr(cls, "__post_init__", None)

        def check(self: Any) -> None:
            made: type = type(self)
            for name, hint in field_hints(made).items():
                if not fits(hint, getattr(self, name)):
                    raise ValueError(mismatch(f"{key}.{name}".lstrip("."), hint, getattr(self, name)))
            if check_rules is not None:
                check_rules(self)

        cls.__post_init__ = check
        dataclass(frozen=True, kw_only=True)(cls)
        return cls

    return make


def guest_sections(config: Any, key: str) -> dict[str, Any]:
    """The guests' sections of a section, by full key.

    Args:
        config: the section.
        key: its full key.
    """
    return {
        full: getattr(config, full.rpartition(".")[2])
        for full in targets("section")
        if full.rpartition(".")[0] == key
    }


def code_of_guests(config: Any, key: str) -> Iterator[Named]:
    """What the guests' sections of a section would have run, imported, started or contacted.

    A guest's section says it in its method `code_named`: for each such setting its name there, the value with what
    becomes of it, and the file, where it is one.

    Args:
        config: the section.
        key: its full key.
    """
    for full, below in guest_sections(config, key).items():
        for name, value, path in below.code_named():
            yield Named(key=f"{full}.{name}", value=value, path=path)


def section_of(config: Any, cls: type[S]) -> S:
    """The section of type `cls` right below `config`, for the guest that declared it.

    Raises:
        LookupError: `config` has no such section.
    """
    for name in type(config).__dataclass_fields__:
        value = getattr(config, name)
        if isinstance(value, cls):
            return value
    raise LookupError(f"{type(config).__name__} has no section of type {cls.__name__}")
