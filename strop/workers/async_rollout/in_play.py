"""The file of a checkpoint that holds what was generated for the prompts of no step yet, one a line."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from strop.rewards import Outcome
from strop.run import CheckpointError
from strop.workers.async_rollout.generation_cache import RequestState
from strop.workers.async_rollout.saved_group import SavedGroup
from strop.workers.async_rollout.score_cache import SavedScore

IN_PLAY = "in_play.jsonl"


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """Saved state of one prompt's group."""

    uid: str
    version: int
    """Policy version at its start."""
    place: int | None
    """Its place among those that have ended, from 0 for the first; None: samples of it are on their way."""
    is_looked_at: bool = False
    """A step has looked at it, and left it for a later one."""
    kept: SavedGroup = field(default_factory=SavedGroup)


def in_play_text(
    versions: Mapping[str, int],
    saved: Mapping[str, SavedGroup],
    ended: Sequence[str],
    looked_at: Collection[str] = (),
) -> str:
    """The content of the file.

    Args:
        versions: by uid, in the order in which they were begun, the policy version at that time.
        saved: by uid, what was generated and scored.
        ended: uids of those that have ended, the first one first.
        looked_at: uids of those that a step has looked at.
    """
    places = {uid: place for place, uid in enumerate(ended)}
    lines = [
        {
            "uid": uid,
            "version": version,
            "place": places.get(uid),
            "is_looked_at": uid in looked_at,
            **asdict(saved.get(uid, SavedGroup())),
        }
        for uid, version in versions.items()
    ]
    return "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)


def read_in_play(file: Path) -> dict[str, GroupState]:
    """Saved groups by uid, in the order of their start; nothing where there is no such file.

    Raises:
        CheckpointError: the file is damaged.
    """
    groups: dict[str, GroupState] = {}
    if not file.is_file():
        return groups
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            group = _read(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{file} is damaged: line {number} does not say what was in play ({type(error).__name__}: {error}); "
                f"remove the checkpoint, and the run continues from an earlier one"
            ) from error
        groups[group.uid] = group
    return groups


def _read(line: str) -> GroupState:
    fields = json.loads(line)
    requests = {str(name): RequestState(**note) for name, note in fields["requests"].items()}
    for note in requests.values():
        if len({len(note.token_ids), len(note.log_probs), len(note.versions)}) > 1:
            raise ValueError("the tokens of a request and their log-probs differ in number")
    scores = {
        str(number): SavedScore(scored=str(score["scored"]), outcome=Outcome(**score["outcome"]))
        for number, score in fields.get("scores", {}).items()
    }
    place = fields["place"]
    return GroupState(
        uid=str(fields["uid"]),
        version=int(fields["version"]),
        place=None if place is None else int(place),
        is_looked_at=bool(fields.get("is_looked_at", False)),
        kept=SavedGroup(requests=requests, scores=scores),
    )
