"""Overrides that turn one configuration into another."""

from __future__ import annotations

from strop.config.overrides import override_text
from strop.config.save import to_flat_dict


def overrides_between(before: object, after: object) -> tuple[str, ...]:
    """One override for each key of which two configurations of a class have different values.

    Args:
        before: the configuration that they are given on top of.
        after: the one that they lead to.
    """
    old = to_flat_dict(before)
    return tuple(override_text(key, value) for key, value in to_flat_dict(after).items() if value != old[key])
