"""Names that arrive from a configuration, and what they stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any, Generic, TypeVar

from strop.utils.field_types import nearest

T = TypeVar("T")


class Registry(dict[str, T], Generic[T]):
    """Things by name. An unknown name lists the known ones; names are case-sensitive.

    Args:
        kind: what they are, for messages.
        known: those that are there from the start.
        replaceable: a name may be given to something else later.
    """

    def __init__(self, kind: str, known: Mapping[str, T] | None = None, *, replaceable: bool = False) -> None:
        super().__init__(known or {})
        self.kind = kind
        self.replaceable = replaceable

    def register(self, name: str | Enum) -> Callable[[T], T]:
        """A decorator that makes something known under `name`, and returns it unchanged.

        Raises:
            ValueError: the name belongs to something else, and this registry does not replace.
        """

        def add(thing: T) -> T:
            self.check_free(thing, name_of(name))
            self[name_of(name)] = thing
            return thing

        return add

    def check_free(self, thing: T, *names: str) -> None:
        """Raise a ValueError where one of the names belongs to something else, and this registry does not replace."""
        for name in names:
            if name in self and self[name] is not thing and not self.replaceable:
                raise ValueError(
                    f"{self.kind} {name!r} is already registered by {dotted(self[name])}: choose another name for "
                    f"{dotted(thing)}"
                )

    def __missing__(self, name: str) -> T:
        raise ValueError(unknown(self.kind, name, self))


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """A sentence for a name that nothing has."""
    suggestion = nearest(name, known)
    way = f"Did you mean {suggestion}? " if suggestion else ""
    return (
        f"unknown {kind} {name!r}; known: {', '.join(sorted(known)) or 'none'}. {way}A function of "
        f"your own must be registered under this name before the run starts"
    )


def name_of(name: str | Enum) -> str:
    """The registered spelling of a name or of an enum member, which stands for its value."""
    return str(name.value) if isinstance(name, Enum) else name


def dotted(thing: Any) -> str:
    """The dotted path of a function or class, for messages."""
    return f"{thing.__module__}.{getattr(thing, '__qualname__', repr(thing))}"


def required_parameters(function: Callable[..., Any]) -> list[str]:
    """Parameters that a call must give, by name, in order: those without a default."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
