"""Data sources whose answers have no verdict: some reward of theirs was neither 0 nor 1, and nothing else decides.

Rewards of 0 and 1 alone say which answers pass, as long as there are no others. One that is between them, in training
or in a validation, shows that the function gives partial credit; from then on its 1 is no verdict either, also in a
validation where every answer happens to have it.
"""

from __future__ import annotations

from collections.abc import Sequence

from strop.rewards.config import RewardConfig
from strop.run.events import EventLog
from strop.workers.reports import EpisodeReport

EVENT = "undecided"


class UndecidedSources:
    """The sources of a run of which that was seen, by an earlier start of the run too."""

    def __init__(self, reward: RewardConfig, events: EventLog | None = None) -> None:
        """Read the records of a run.

        Args:
            reward: with `pass_by`, each answer is decided by itself, and no source is noted.
            events: of the run; None: begin with none, and keep no record.
        """
        self._is_watching = not reward.pass_by
        self._events = events
        earlier = () if events is None else events.read(EVENT)
        self.names = {str(event["data_source"]) for event in earlier}

    def observe(self, step: int, reports: Sequence[EpisodeReport]) -> None:
        """Note the sources of these samples, whose step this is."""
        for report in reports if self._is_watching else ():
            if report.data_source not in self.names and report.passes is None:
                self.names.add(report.data_source)
                if self._events is not None:
                    self._events.append(EVENT, step, data_source=report.data_source, score=report.score)
