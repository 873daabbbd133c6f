"""Which samples of a step are looked at, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from strop.run import RunError

SORTS = ("worst", "best")
Row = Mapping[str, Any]


def matching(rows: Sequence[dict[str, Any]], *, source: str | None, is_cut: bool) -> list[dict[str, Any]]:
    """Rows of one data source, and rows whose answer was cut at a limit of tokens.

    Args:
        rows: of the sample store, at least one.
        source: a data source; None takes all.
        is_cut: only answers that ended with `length`.

    Raises:
        RunError: no row is left.
    """
    found = [row for row in rows if source is None or row["data_source"] == source]
    if not found:
        known = sorted({str(row["data_source"]) for row in rows})
        raise RunError(f"no sample here is of the data source {source!r}; there are {', '.join(known)}")
    if not is_cut:
        return found
    cut = [row for row in found if row["stop_reason"] == "length"]
    if not cut:
        raise RunError(f"none of these {len(found)} samples was cut at a limit of tokens; leave out --cut")
    return cut


def in_order(rows: Sequence[dict[str, Any]], *, sort: str | None) -> list[dict[str, Any]]:
    """An answer to each prompt before the second answer to any; by score where that is asked for.

    Args:
        rows: of the sample store.
        sort: "worst" or "best" score first; rows without a score come last.
    """
    seen: Counter[str] = Counter()
    turns = []
    for row in rows:
        turns.append(seen[row["uid"]])
        seen[row["uid"]] += 1
    spread = [rows[number] for number in sorted(range(len(rows)), key=turns.__getitem__)]
    if sort is None:
        return spread
    sign = 1 if sort == "worst" else -1
    return sorted(spread, key=lambda row: (row["score"] is None, sign * (row["score"] or 0.0)))
