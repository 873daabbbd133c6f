"""Ids of visits: of a training row in an epoch, and of a validation row."""

from __future__ import annotations

import re

_VISIT_UID = re.compile(r"e(\d+)-(\d{6,})")


def visit_uid(epoch: int, row: int) -> str:
    """Id of the visit of a training row in an epoch: `e0-000017`."""
    return f"e{epoch}-{row:06d}"


def val_uid(row: int) -> str:
    """Id of a validation row: `val-000017`."""
    return f"val-{row:06d}"


def is_visit(uid: str) -> bool:
    """True if the id is that of a training visit."""
    return _VISIT_UID.fullmatch(uid) is not None


def parse_visit_uid(uid: str) -> tuple[int, int]:
    """Epoch and row of a training visit; the inverse of `visit_uid`."""
    match = _VISIT_UID.fullmatch(uid)
    if match is None:
        raise ValueError(f"{uid!r} is no id of a training visit; those look like {visit_uid(0, 17)!r}")
    return int(match[1]), int(match[2])
