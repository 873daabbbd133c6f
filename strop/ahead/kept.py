"""What is known of a group that is in play, by which it can go on in another process."""

from __future__ import annotations

from dataclasses import dataclass, field

from strop.ahead.journal import Notes
from strop.ahead.score_journal import ScoreNotes


@dataclass(frozen=True, kw_only=True)
class KeptGroup:
    """The group of one prompt, as far as it came."""

    requests: Notes = field(default_factory=dict)
    """What was generated."""
    scores: ScoreNotes = field(default_factory=dict)
    """Of the samples that were scored."""
