"""Names that arrive from a config, the functions they stand for, and what each function declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a registered function asks for; the trainer computes what is needed, and nothing else."""

    needs: frozenset[str] = frozenset()
    """Columns passed by keyword, e.g. `group_ids` or `values`. Empty: the function declared nothing and
    follows the field's own calling convention."""
    settings: frozenset[str] = frozenset()
    """Numbers and switches passed by keyword, e.g. `norm_by_std`."""
    is_group_relative: bool = False
    """True if the result compares the samples of one prompt, so that one sample teaches nothing."""


class Registry(dict[str, F], Generic[F]):
    """Functions by name. An unknown name lists the known ones; names are case-sensitive."""

    def __init__(self, kind: str, *, replaceable: bool) -> None:
        super().__init__()
        self.kind = kind
        self.replaceable = replaceable
        self._declarations: dict[str, Declaration] = {}

    def register(
        self,
        name: str | Enum,
        *,
        needs: Iterable[str] = (),
        settings: Iterable[str] = (),
        group_relative: bool = False,
    ) -> Callable[[F], F]:
        """A decorator that stores the function under `name` and returns it unchanged.

        Raises:
            ValueError: the name belongs to another function and this registry does not replace.
        """
        key = name_of(name)
        declaration = Declaration(
            needs=frozenset(needs), settings=frozenset(settings), is_group_relative=group_relative
        )

        def add(function: F) -> F:
            taken_by = self.get(key)
            if taken_by is not None and taken_by is not function and not self.replaceable:
                raise ValueError(
                    f"{self.kind} {key!r} is already registered by "
                    f"{taken_by.__module__}.{taken_by.__qualname__}: choose another name for "
                    f"{function.__module__}.{function.__qualname__}"
                )
            self[key] = function
            self._declarations[key] = declaration
            return function

        return add

    def declaration(self, name: str | Enum) -> Declaration:
        """What the function under `name` declared when it was registered."""
        key = name_of(name)
        self[key]  # an unknown name fails here, with the known ones in the message
        return self._declarations.get(key, Declaration())

    def __missing__(self, name: str) -> F:
        raise ValueError(
            f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self)) or 'none'}. A function of "
            f"your own must be registered under this name before the run starts"
        )


def name_of(name: str | Enum) -> str:
    """The registered spelling of a name or of an enum member, which stands for its value."""
    return str(name.value) if isinstance(name, Enum) else name
