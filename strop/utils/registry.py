"""Registries: names that a configuration uses, for parts of strop's, of the user's files and of installed packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from strop.utils.field_types import nearest

T = TypeVar("T")


class Registry(dict[str, T], Generic[T]):
    """Things by name. An unknown name lists the known ones; names are case-sensitive.

    A name that nothing in this process has is looked for in the entry points of installed packages: the module of one
    of that name in `group` is imported when it is first asked for, and registers the name as a user's file does.

    Args:
        kind: what they are, for messages.
        known: those that are there from the start.
        group: name of the group of entry points; "": packages bring none.
        replaceable: a name may be given to something else later.
    """

    def __init__(
        self, kind: str, known: Mapping[str, T] | None = None, *, group: str = "", replaceable: bool = False
    ) -> None:
        super().__init__(known or {})
        self.kind = kind
        self.group = group
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
            holder = self.get(name)
            if holder is not None and holder is not thing and not self.replaceable:
                raise ValueError(
                    f"{self.kind} {name!r} is already registered by {dotted(holder)}: choose another name for "
                    f"{dotted(thing)}"
                )

    def check_built_in(self, name: str, thing: T | None = None) -> None:
        """Refuse a second thing under the name of a built-in one, because it would never be used.

        Args:
            name: of the built-in thing.
            thing: the built-in thing, where it is registered here; None: it stands elsewhere.

        Raises:
            ValueError: the name is registered too, or an installed package brings it.
        """
        holder = self.get(name)
        if holder is not None and holder is not thing:
            raise ValueError(
                f"{self.kind} {name!r} is built in, and {dotted(holder)} is registered under the same name: choose "
                f"another name for it"
            )
        if entries := packaged(self.group).get(name):
            packages = packages_of(entries)
            raise ValueError(
                f"{self.kind} {name!r} is built in, and an entry point ({self.group}) of the installed package "
                f"{', '.join(packages)} has the same name: rename the entry point, or uninstall {packages[0]}"
            )

    def names(self) -> list[str]:
        """All names in order: those of this process, and those that installed packages bring."""
        return sorted({*self, *packaged(self.group)})

    def __contains__(self, name: object) -> bool:
        """True also for a name that an installed package brings and nobody has asked for yet."""
        return super().__contains__(name) or name in packaged(self.group)

    def __missing__(self, name: str) -> T:
        if name in packaged(self.group):
            load_packaged(self.kind, self.group, name)
            if not super().__contains__(name):
                raise ValueError(
                    f"the entry point {name!r} of {self.group} registers no {self.kind} of this name when its module "
                    f"is imported: decorate the function or class there"
                )
            return self[name]
        raise ValueError(unknown(self.kind, name, self.names(), group=self.group))


@cache
def packaged(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """The entry points of a group by name, those of every installed package; they are read once per process."""
    entries: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group) if group else ():
        entries[entry.name] = (*entries.get(entry.name, ()), entry)
    return entries


def packages_of(entries: Iterable[EntryPoint]) -> list[str]:
    """Names of the packages of entry points, in order."""
    return sorted({entry.dist.name if entry.dist is not None else entry.value for entry in entries})


def load_packaged(kind: str, group: str, name: str) -> None:
    """Import the module of the entry point of this name, whose decorators register what it brings.

    Raises:
        ValueError: two packages have an entry point of this name, or the module cannot be imported.
    """
    entries = packaged(group)[name]
    packages = packages_of(entries)
    if len(packages) > 1:
        raise ValueError(
            f"{kind} {name!r} is an entry point ({group}) of several installed packages, {', '.join(packages)}: "
            f"uninstall all but one of them"
        )
    try:
        entries[0].load()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{kind} {name!r} comes from the installed package {packages[0]} ({group}: {entries[0].value}), which "
            f"cannot be imported: {type(error).__name__}: {error}"
        ) from error


def unknown(kind: str, name: str, known: Collection[str], *, group: str = "") -> str:
    """The sentence for a name that nothing has.

    Args:
        kind: of the thing.
        name: that was asked for.
        known: names that there are.
        group: of entry points in which installed packages bring such things; "": they bring none.
    """
    suggestion = nearest(name, known)
    hint = f"Did you mean {suggestion}? " if suggestion else ""
    package = f", or be an entry point ({group}) of an installed package" if group else ""
    return (
        f"unknown {kind} {name!r}; known: {', '.join(sorted(known)) or 'none'}. {hint}One of your own must be "
        f"registered under this name before the run starts{package}"
    )


def name_of(name: str | Enum) -> str:
    """The registered spelling of a name or of an enum member, which stands for its value."""
    return str(name.value) if isinstance(name, Enum) else name


def dotted(thing: object) -> str:
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
