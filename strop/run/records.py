"""The form of the records in an event log, by kind.

Records of other kinds, and other fields, are free. A log may have been written by anybody.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_RANGES = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", re.ASCII)
"""Sample indices of one prompt, such as 0-2,5."""
_COUNTS = ("issued", "in_flight", "trained", "filtered", "failed", "stale")
MAX_STEP = 2**31
"""Steps are stored with the samples as numbers of 32 bits."""


def is_record(record: object) -> bool:
    """A mapping with a kind, a step, and what its kind needs."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return False
    step = record.get("step")
    if type(step) is not int or not 0 <= step < MAX_STEP:
        return False
    return all(fits(record.get(name)) for name, fits in _NEEDED.get(record["kind"], {}).items())


def is_ledger(state: object) -> bool:
    """The state of a ledger, as its records and the facts of a checkpoint hold it."""
    if not isinstance(state, dict):
        return False
    counts = state.get("counts")
    are_counts = isinstance(counts, dict) and all(type(counts.get(name)) is int for name in _COUNTS)
    return are_counts and _are_ranges(state.get("issued")) and _are_ranges(state.get("settled"))


def _are_ranges(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(text, str) and (not text or _RANGES.fullmatch(text)) for text in value.values()
    )


def _are_fates(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(by_reason, dict) and all(map(_are_ranges, by_reason.values()))
        for by_reason in value.values()
    )


def _are_texts(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    """Also as one of the words that stand for NaN and infinities."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) or value in ("nan", "inf", "-inf")


def _is_number_or_none(value: object) -> bool:
    return value is None or _is_number(value)


_NEEDED: dict[str, dict[str, Callable[[Any], bool]]] = {
    "issued": {"samples": _are_ranges},
    "settled": {"fates": _are_fates},
    "ledger_restored": {"state": is_ledger},
    "fingerprint": {"stages": _are_texts, "chain": _is_text},
    "validation": {"pass_rate": _is_number_or_none},
    "finished": {"seconds": _is_number, "loss": _is_number_or_none, "val_loss": _is_number_or_none},
}
