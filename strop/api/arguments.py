"""Arguments of the functions that users call: a name that is not known is answered with the nearest one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

from strop.utils.field_types import nearest

P = ParamSpec("P")
T = TypeVar("T")


def named_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which names the nearest argument where it is given one that it has not."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        check_names(f"{function.__name__}()", kwargs, known)
        return function(*args, **kwargs)

    return call


def check_names(
    whose: str, given: Collection[str], known: Collection[str], *, elsewhere: Mapping[str, str] | None = None
) -> None:
    """Refuse names that are not among the known ones.

    Args:
        whose: the function or class, for the sentence.
        given, known: names of arguments.
        elsewhere: what other libraries call an argument: their name to ours.

    Raises:
        TypeError: the sentence names the nearest one.
    """
    for name in given:
        if name in known:
            continue
        ours = (elsewhere or {}).get(name) or nearest(name, known)
        hint = f"did you mean {ours!r}?" if ours else f"it has {', '.join(known)}"
        raise TypeError(f"{whose} has no argument {name!r}; {hint}")
