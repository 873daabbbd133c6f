"""Dispatch modes that users add, by name, and as dictionaries of functions, as verl has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.controller.dispatch import CollectFn, Dispatch, DispatchFn, DispatchMode

MODES: dict[str, DispatchMode] = {name: mode.value for name, mode in Dispatch.__members__.items()}
"""Modes by name, with those that users add."""


def register_dispatch_mode(
    name: str,
    dispatch_fn: DispatchFn,
    collect_fn: CollectFn | None = None,
    *,
    cuts_rows: bool = False,
    joins_rows: bool = False,
    reporters_only: bool = False,
) -> DispatchMode:
    """Add a mode under a name that `register` then accepts; the same mode twice is fine.

    The arguments are those fields of `DispatchMode`; `collect_fn` is left out where `joins_rows`.

    Raises:
        ValueError: another mode has the name already.
    """
    mode = DispatchMode(
        name=name,
        dispatch_fn=dispatch_fn,
        collect_fn=collect_fn,
        cuts_rows=cuts_rows,
        joins_rows=joins_rows,
        reporters_only=reporters_only,
    )
    if MODES.get(name, mode) != mode:
        raise ValueError(f"dispatch mode {name!r} is already registered: {MODES[name]!r}; use another name")
    MODES[name] = mode
    return mode


_FLAGS = {"cuts_rows", "joins_rows", "reporters_only"}


def mode_named(mode: str | Mapping[str, Any]) -> DispatchMode:
    """The mode that a worker method is registered with: by its name, or as a mode's functions."""
    if isinstance(mode, Mapping):
        functions = set(mode) - _FLAGS
        if functions != {"dispatch_fn", "collect_fn"} and not (
            mode.get("joins_rows") and functions == {"dispatch_fn"}
        ):
            raise ValueError(
                f"a dispatch mode as a dictionary has the keys dispatch_fn and collect_fn, got {sorted(mode)}"
            )
        return DispatchMode(name="custom", **mode)
    if mode not in MODES:
        raise ValueError(f"unknown dispatch mode {mode!r}; known: {', '.join(sorted(MODES))}")
    return MODES[mode]
