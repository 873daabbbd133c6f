"""What an optimizer step came to, on each rank and on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.base.metrics import Reduction, merge_metrics
from strop.protocol import DataProto
from strop.protocol.merging import METRICS


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step of one rank."""

    metrics: Mapping[str, Reduction]
    skipped: str = ""
    """Why no step was taken, the same on every rank; empty when one was."""


def merged_update(updates: Sequence[Update]) -> Update:
    """The step of all ranks; one without rows has seen nothing of some metrics."""
    return Update(metrics=merge_metrics(update.metrics for update in updates), skipped=updates[0].skipped)


def with_update(rows: DataProto, update: Update) -> DataProto:
    """Rows that an optimizer step has seen, together with what it came to."""
    return DataProto(rows.batch, rows.non_tensor_batch, {METRICS: {"update": update}})


def updates_of(rows: DataProto) -> list[Update]:
    """Of every rank that has made such rows, in order."""
    found = rows.meta_info[METRICS]["update"]
    return [found] if isinstance(found, Update) else list(found)
