"""The recorded order in which a run that is repeated took its groups (strop replay)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from strop.run import RunError
from strop.run.replay_schedule import Spans, StepSchedule


class RecordedOrder:
    """Says which group a step looks at next, and which versions sampled the tokens of a group."""

    def __init__(self, steps: Mapping[int, StepSchedule]) -> None:
        """`steps`: the schedule by step; empty where no run is repeated."""
        self._steps = steps
        self.spans: Mapping[str, Spans] = {
            uid: spans for step in steps.values() for uid, spans in step.spans.items()
        }
        """Recorded spans by uid."""

    def __bool__(self) -> bool:
        return bool(self._steps)

    def has(self, step: int) -> bool:
        """The order of this step was recorded."""
        return step in self._steps

    def next(self, step: int, waiting: Collection[str]) -> str:
        """The group that the step looks at next.

        Args:
            step: whose order was recorded.
            waiting: uids of the groups in flight and completed that no step has looked at.

        Raises:
            RunError: the repeated run had looked at no more groups.
        """
        for uid in self._steps[step].ended:
            if uid in waiting:
                return uid
        raise RunError(
            f"step {step} needs more groups than the run that is repeated had looked at: it left the schedule, "
            f"because samples came out otherwise"
        )
