"""Sections of the configuration: frozen dataclasses that check their fields, those of guests among them.

A guest declares a section of its own right below one of the core (place "section"), or fields that stand beside those
of the core (place "settings").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, dataclass_transform

from strop.base.field_types import field_hints, fits
from strop.base.guests import joined, targets
from strop.base.trust import Named
from strop.base.wrong_values import mismatch

C = TypeVar("C", bound=type[Any])
S = TypeVar("S")
_KEYS: dict[type, str] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(key: str) -> Callable[[C], C]:
    """Class decorator: a frozen dataclass whose values fit the annotations of their fields, bounds included
    (strop.base.field_types). It has a field for every section that a guest declares right below `key`, and the fields
    of the settings that guests declare there, which become its base classes. Rules across fields follow in
    `__post_init__` of the settings of guests, and in its own at the end.

    Args:
        key: full key of the section in the root configuration, which errors begin with; "" for the root itself.
    """

    def make(cls: C) -> C:
        parts = [joined("settings", full) for full in targets("settings") if full.rpartition(".")[0] == key]
        rules = [part.__post_init__ for part in (*parts, cls) if hasattr(part, "__post_init__")]

        def check(self: Any) -> None:
            check_fields(self, key)
            for rule in rules:
                rule(self)

        if parts:
            own = dataclass(frozen=True, kw_only=True)(cls)
            # The first line is where Python 3.13 looks for the source of a class; before, it went by the name.
            facts = ("__module__", "__doc__", "__firstlineno__")
            same = {name: vars(own)[name] for name in facts if name in vars(own)}
            cls = cast(C, type(own.__name__, (*reversed(parts), own), same))
        for full in targets("section"):
            parent, _, name = full.rpartition(".")
            if parent == key:
                below = joined("section", full)
                cls.__annotations__[name] = below
                setattr(cls, name, field(default_factory=below))
        cls.__post_init__ = check
        _KEYS[cls] = key
        dataclass(frozen=True, kw_only=True)(cls)
        return cls

    return make


def section_key(cls: type) -> str:
    """The key with which the class of a section was declared; "" for other classes."""
    return _KEYS.get(cls, "")


def check_fields(config: Any, key: str) -> None:
    """Refuse a section with a value that does not fit its field.

    Args:
        config: the section.
        key: its full key.

    Raises:
        ValueError: the sentence says which, and what the field needs.
    """
    cls: type = type(config)
    for name, hint in field_hints(cls).items():
        if not fits(hint, getattr(config, name)):
            raise ValueError(mismatch(f"{key}.{name}".lstrip("."), hint, getattr(config, name)))


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

    A guest's section that names any says it in its method `code_named`: for each such setting its name there, the value
    with what becomes of it, and the file, where it is one.

    Args:
        config: the section.
        key: its full key.
    """
    for full, below in guest_sections(config, key).items():
        named = below.code_named() if hasattr(below, "code_named") else ()
        for name, value, path in named:
            yield Named(key=f"{full}.{name}", value=value, path=path)


def section_on(config: Any, name: str) -> Any:
    """The section of this name right below `config`, which a guest may bring, where it asks for something (its property
    is_on); else None."""
    below = getattr(config, name, None)
    return below if below is not None and below.is_on else None


def section_of(config: Any, cls: type[S]) -> S:
    """The section of type `cls` right below `config`, or `config` itself where these settings are among its own.

    Raises:
        LookupError: `config` has no such section.
    """
    if isinstance(config, cls):
        return config
    for name in type(config).__dataclass_fields__:
        value = getattr(config, name)
        if isinstance(value, cls):
            return value
    raise LookupError(f"{type(config).__name__} has no section of type {cls.__name__}")
