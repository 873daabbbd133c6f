"""`strop samples RUN --why-dropped`: what became of every sample of a run, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.run import RunFolder
from strop.run.ledger import SETTLED, sample_ids
from strop.utils.terminal import plain

if TYPE_CHECKING:
    from rich.table import Table

NUM_EXAMPLES = 2


@dataclass(kw_only=True)
class Fates:
    """The samples of one fate and reason."""

    name: str
    reason: str
    count: int = 0
    steps: set[int] = field(default_factory=set)
    examples: list[str] = field(default_factory=list)

    def add(self, step: int, ids: Iterable[str]) -> None:
        """Count these samples of a step."""
        for sample_id in ids:
            self.count += 1
            if len(self.examples) < NUM_EXAMPLES:
                self.examples.append(sample_id)
        self.steps.add(step)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "fate": self.name,
            "reason": self.reason,
            "count": self.count,
            "first_step": min(self.steps, default=None),
            "last_step": max(self.steps, default=None),
            "examples": self.examples,
        }


def find_fates(run: RunFolder, *, step: int | None = None) -> list[Fates]:
    """Every fate and reason of the run's samples, those that were lost first, the most frequent first.

    Args:
        run: its event log is the source.
        step: only samples whose fate was settled in this step; None takes all, and those in flight.
    """
    fates_by_id: dict[tuple[str, str], Fates] = {}
    for event in run.events.read(SETTLED):
        if step is not None and event["step"] != step:
            continue
        for name, by_reason in event["fates"].items():
            for reason, samples in by_reason.items():
                fates = fates_by_id.setdefault((name, reason), Fates(name=name, reason=reason))
                fates.add(event["step"], sample_ids(samples))
    if step is None:
        waiting = Fates(name="in_flight", reason="not settled when the log ends; a resume makes them again")
        waiting.add(0, run.ledger.in_flight())
        waiting.steps.clear()
        if waiting.count:
            fates_by_id["in_flight", ""] = waiting
    return sorted(fates_by_id.values(), key=lambda fates: (fates.name == "trained", -fates.count))


def table_of(fates: Iterable[Fates]) -> Table:
    """For a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table("fate", "why", "samples", "steps", "for example", box=None)
    for fate in fates:
        steps = "" if not fate.steps else f"{min(fate.steps)} to {max(fate.steps)}"
        cells = (fate.name, fate.reason, str(fate.count), steps, ", ".join(fate.examples))
        table.add_row(*(Text(plain(text, is_one_line=True)) for text in cells))
    return table
