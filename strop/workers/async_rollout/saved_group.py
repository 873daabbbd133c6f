"""What is known of a group that is in play, by which it can go on in another process."""

from __future__ import annotations

from dataclasses import dataclass, field

from strop.workers.async_rollout.generation_cache import RequestStates
from strop.workers.async_rollout.score_cache import SavedScores


@dataclass(frozen=True, kw_only=True)
class SavedGroup:
    """The group of one prompt, as far as it came."""

    requests: RequestStates = field(default_factory=dict)
    """What was generated."""
    scores: SavedScores = field(default_factory=dict)
    """Of the samples that were scored."""
