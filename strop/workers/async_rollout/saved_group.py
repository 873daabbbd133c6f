"""State of a group in flight, with which it goes on in another process."""

from __future__ import annotations

from dataclasses import dataclass, field

from strop.workers.async_rollout.generation_cache import RequestStates
from strop.workers.async_rollout.score_cache import SavedScores


@dataclass(frozen=True, kw_only=True)
class SavedGroup:
    """State of the group of one prompt."""

    requests: RequestStates = field(default_factory=dict)
    """State of its requests."""
    scores: SavedScores = field(default_factory=dict)
    """Scores of the samples that were scored."""
