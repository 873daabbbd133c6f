"""Sections of the configuration: frozen dataclasses that check their fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, dataclass_transform

from strop.config.wrong_values import mismatch
from strop.utils.field_types import field_hints, fits
from strop.utils.trust import CodeReference


class Switched(Protocol):
    """A section that asks for something, or not."""

    @property
    def is_on(self) -> bool:
        """It does."""


C = TypeVar("C", bound=type[Any])
S = TypeVar("S", bound=Switched)
_KEYS: dict[type, str] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(key: str) -> Callable[[C], C]:
    """Class decorator: a frozen dataclass whose values fit the annotations of their fields, bounds included
    (strop.utils.field_types). Rules across fields follow in its own `__post_init__`.

    Args:
        key: full key of the section in the root configuration, which errors begin with; "" for the root itself.
    """

    def make(cls: C) -> C:
        rules = getattr(cls, "__post_init__", None)

        def check(self: Any) -> None:
            check_fields(self, key)
            if rules is not None:
                rules(self)

        cls.__post_init__ = check
        _KEYS[cls] = key
        dataclass(frozen=True, kw_only=True)(cls)
        return cls

    return make


def section_key(cls: type) -> str:
    """The key with which the class of a section was declared; "" for other classes."""
    return _KEYS.get(cls, "")


def check_fields(config: object, key: str) -> None:
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


def code_below(config: object, key: str, name: str) -> Iterator[CodeReference]:
    """As `code_of`, of the section `name` below the section `config`, whose full key is `key`."""
    yield from code_of(getattr(config, name), f"{key}.{name}".lstrip("."))


def code_of(config: object, key: str) -> Iterator[CodeReference]:
    """References to code, programs and hosts in a section: all it would run, import, start or contact.

    A section that names any has a method `code_references`, which gives for each such setting its name there, the
    value with what becomes of it, and the file, where it is one.

    Args:
        config: the section.
        key: its full key.
    """
    references = config.code_references() if hasattr(config, "code_references") else ()
    for setting, value, path in references:
        yield CodeReference(key=f"{key}.{setting}", value=value, path=path)


def where_on(section: S) -> S | None:
    """The section where it asks for something (its property is_on), else None."""
    return section if section.is_on else None
