"""Cases of parametrized tests and draws of property tests: those of `make test`, and all in `make test-slow`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def by_default(cases: Iterable[Any], *names: Any) -> list[Any]:
    """All cases, of which those that are named run by default. Names are values, or the ids of `pytest.param`.

    Raises:
        ValueError: a name is no case, or two cases have it.
    """
    cases = list(cases)
    known = {_name(case): case for case in cases}
    if len(known) < len(cases):
        raise ValueError(f"of {len(cases)} cases only {len(known)} have names of their own: give them ids")
    if missing := [name for name in names if name not in known]:
        raise ValueError(
            f"no case is named {', '.join(map(str, missing))}; there are {', '.join(map(str, known))}"
        )
    return [case if name in names else _slow(case) for name, case in known.items()]


def draws(count: int, *, by_default: int) -> int:
    """Examples of a property test whose draws cost much, which is marked `draws`; all of them where STROP_ALL_DRAWS is
    set."""
    return count if os.environ.get("STROP_ALL_DRAWS") else by_default


def _name(case: Any) -> Any:
    if not hasattr(case, "marks"):
        return case
    return case.id if case.id is not None else case.values[0]


def _slow(case: Any) -> Any:
    if not hasattr(case, "marks"):
        return pytest.param(case, marks=pytest.mark.slow)
    return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
