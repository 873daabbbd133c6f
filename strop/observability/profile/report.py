"""Profile of a run: where its time went, and the largest part that a setting would save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strop.observability.profile.avoidable import Avoidable, largest_avoidable
from strop.observability.profile.phases import Phases, phases_of
from strop.observability.profile.steps import ProfiledStep, read_profiled
from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.summary import flattened


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Time of a run."""

    run: Path
    phases: Phases
    avoidable: Avoidable | None
    profiled: tuple[ProfiledStep, ...]
    unreadable: tuple[str, ...] = ()
    """A sentence for each profiled step whose timeline cannot be read."""

    def share(self, seconds: float) -> float:
        """Of the time of the run."""
        return seconds / self.phases.total if self.phases.total else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        part = self.avoidable
        return {
            "run": str(self.run),
            "num_steps": len(self.phases.steps),
            "seconds": self.phases.total,
            "phases": [
                {"name": name, "seconds": seconds, "share": self.share(seconds)}
                for name, seconds in self.phases.seconds.items()
            ],
            "avoidable": None if part is None else {**asdict(part), "share": self.share(part.seconds)},
            "profiled": [{**asdict(step), "file": str(step.file)} for step in self.profiled],
            "unreadable": list(self.unreadable),
        }


def profile_of(records: RunRecords) -> Profile:
    """The profile of a run, as its records were last read."""
    phases = phases_of(records)
    profiled, unreadable = read_profiled(records.path, phases.steps)
    settings: Mapping[str, Any] = flattened(records.config)
    return Profile(
        run=records.path,
        phases=phases,
        avoidable=largest_avoidable(phases, settings, profiled),
        profiled=tuple(profiled),
        unreadable=tuple(unreadable),
    )
