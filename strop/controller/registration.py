"""The mark on a worker method that a group may call: dispatch mode, executing workers, blocking."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from strop.controller.dispatch import Dispatch, DispatchMode
from strop.controller.dispatch_modes import mode_named

_MARK = "_strop_registration"

F = TypeVar("F", bound=Callable[..., Any])


class Execute(Enum):
    """Workers that run a method: all, or worker 0."""

    ALL = "ALL"
    """All of them."""
    RANK_ZERO = "RANK_ZERO"
    """Worker 0; the call returns its result."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """Settings of a registered worker method."""

    mode: DispatchMode
    """Mode that splits the arguments and joins the results."""
    execute_mode: Execute
    """Workers that run it."""
    blocking: bool
    """False: the call returns a future."""
    materialize_futures: bool
    """True: a worker is given batches with their rows, which other workers may hold."""
    allows_losses: bool
    """True: the result of a call that cuts rows is that of the workers that are left, where one is lost meanwhile."""

    @property
    def leaves_out_lost(self) -> bool:
        """True where a worker that is lost during a call gives no result: each speaks for itself, or the caller sees
        which rows are missing. Otherwise the call raises WorkerLost."""
        return self.allows_losses or not self.mode.cuts_rows


def register(
    dispatch_mode: Dispatch | DispatchMode | str | Mapping[str, Any] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    allows_losses: bool = False,
) -> Callable[[F], F]:
    """Mark a worker method as callable on a worker group; the method itself stays as it is.

    An override in a subclass keeps the mark unless it is registered anew.

    Args:
        dispatch_mode: a member of `Dispatch`, a mode, the name of one added by `register_dispatch_mode`, or
            `{"dispatch_fn": ..., "collect_fn": ...}` with or without `cuts_rows`, `joins_rows` and `reporters_only`.
        execute_mode: all workers, or worker 0 alone.
        blocking: False makes the call return a future with `get()`; where the mode joins batches, a DataProto whose
            rows the workers may hold (a DataProtoFuture) until `get()`.
        materialize_futures: False hands a DataProtoFuture on as it is.
        allows_losses: the caller finds out which rows are missing where a worker that can be replaced is lost during
            the call, and asks for them again; otherwise the call raises WorkerLost.
    """
    mode = _mode_of(dispatch_mode)
    if execute_mode is Execute.RANK_ZERO and mode.cuts_rows:
        raise ValueError(
            f"{mode.name} gives each worker a part of the rows, and Execute.RANK_ZERO would drop all parts "
            f"but the first; use Dispatch.ONE_TO_ALL with it"
        )
    registration = Registration(
        mode=mode,
        execute_mode=execute_mode,
        blocking=blocking,
        materialize_futures=materialize_futures,
        allows_losses=allows_losses,
    )

    def mark(method: F) -> F:
        if inspect.iscoroutinefunction(method):
            raise TypeError(
                f"{method.__qualname__} is async, and a group waits for plain methods only; use "
                f"blocking=False to go on while workers compute"
            )
        setattr(method, _MARK, registration)
        return method

    return mark


def _mode_of(mode: Dispatch | DispatchMode | str | Mapping[str, Any]) -> DispatchMode:
    if isinstance(mode, Dispatch):
        return mode.value
    if isinstance(mode, DispatchMode):
        return mode
    return mode_named(mode)


def registrations(worker_class: type) -> dict[str, Registration]:
    """The marked methods of a class by name; the mark nearest in the inheritance order wins."""
    methods: dict[str, Registration] = {}
    for base in reversed(worker_class.__mro__):
        for name, member in vars(base).items():
            registration = getattr(member, _MARK, None)
            if isinstance(registration, Registration):
                methods[name] = registration
    return methods
