"""What is known of a group that is in play, by which it can go on in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.workers.async_rollout.journal import Notes
from strop.workers.async_rollout.score_journal import ScoreNotes


@dataclass(frozen=True, kw_only=True)
class KeptGroup:
    """The group of one prompt, as far as it came."""

    requests: Notes = field(default_factory=dict)
    """What was generated."""
    scores: ScoreNotes = field(default_factory=dict)
    """Of the samples that were scored."""
    steps_left: Mapping[str, int] = field(default_factory=dict)
    """Of those that have all their tokens, by number, how long they still take by a clock that counts engine steps."""
