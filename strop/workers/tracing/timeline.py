"""Episode observer that adds samples to the timeline of a profiled step: begin and end of each, with its answers, tool
calls and rewards."""

from __future__ import annotations

import time
from collections.abc import Sequence

from strop.agents.spans import Span
from strop.utils import timeline
from strop.utils.timeline import Fact, TimelineSpan, Track
from strop.workers.episodes import Episode


class TimelineObserver:
    """Adds the episodes of a rollout worker that end while its process is recorded."""

    def __init__(self, track: Track) -> None:
        """`track` is that of the worker."""
        self._track = track

    @property
    def listens(self) -> bool:
        """True while the process is recorded."""
        return timeline.is_recorded()

    def start(self) -> None:
        """Nothing to do."""

    def on_episode_end(self, episode: Episode, spans: Sequence[Span], start_s: float, end_s: float) -> None:
        """Called after an episode, with its start and end in seconds since the epoch."""
        if not timeline.is_recorded():
            return
        shift_s = time.perf_counter() - end_s  # it has ended just now
        num_tokens = sum(len(sequence.response_ids) for sequence in episode.sequences)
        timeline.add(
            TimelineSpan(
                name=episode.id,
                category="episode",
                track=self._track,
                start_s=start_s + shift_s,
                end_s=end_s + shift_s,
                episode=episode.id,
                facts={"response_tokens": num_tokens},
            )
        )
        for span in spans:
            timeline.add(
                TimelineSpan(
                    name=f"{span.kind} {span.name}".rstrip(),
                    category=span.kind,
                    track=self._track,
                    start_s=span.start_s + shift_s,
                    end_s=span.end_s + shift_s,
                    episode=episode.id,
                    facts=_facts(span),
                )
            )

    def close(self) -> None:
        """Nothing to do."""


def _facts(span: Span) -> dict[str, Fact]:
    """Numbers and words of a span; texts that a model wrote stay in the samples."""
    if span.kind == "answer":
        return {
            "prompt_tokens": span.facts["num_prompt_tokens"],
            "tokens": len(span.facts["token_ids"]),
            "stop_reason": span.facts["stop_reason"],
        }
    if span.kind == "tool":
        return {"error": str(span.facts["error"])} if span.facts["error"] else {}
    score = span.facts["score"]
    return {"outcome": span.facts["outcome"], **({} if score is None else {"score": score})}
