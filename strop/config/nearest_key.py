"""The key of a configuration that a user most likely meant: dots in it part sections, unlike those in a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from strop.utils.field_types import nearest

_SAME_SECTION = 0.2
"""Bonus of a key in the same section, or of this very name below it: run.keep is run.keep_last sooner than
algorithm.keep, and critic.lr is critic.optim.lr."""


def nearest_key(key: str, keys: Iterable[str]) -> str | None:
    """The key a user most likely meant, or None where nothing resembles it."""
    return nearest(key, keys, _closeness)


def _closeness(key: str, candidate: str) -> float:
    """Resemblance of two keys, from 0: they are not alike at all."""
    section, _, name = key.lower().rpartition(".")
    other_section, _, other_name = candidate.lower().rpartition(".")
    whole = difflib.SequenceMatcher(None, key.lower(), candidate.lower()).ratio()
    last = difflib.SequenceMatcher(None, name, other_name).ratio()
    if key.startswith(f"{candidate}."):  # the section of the key itself
        return 0.0
    is_below = bool(section) and f"{other_section}.".startswith(f"{section}.")
    if is_below:  # then the section says nothing of the name
        is_part = set(other_name.split("_")) < set(name.split("_"))
        shorter, longer = sorted((name, other_name), key=len)
        is_swapped = sorted(name) == sorted(other_name)
        is_near = last >= 0.65 or is_part or is_swapped or (len(shorter) > 2 and longer.startswith(shorter))
    else:
        is_near = whole >= 0.7 or last >= 0.8
    bonus = _SAME_SECTION if is_below and (last == 1.0 or other_section == section) else 0.0
    return whole + last + bonus if is_near else 0.0
