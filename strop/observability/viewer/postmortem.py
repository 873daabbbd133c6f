"""Incident report: what a run that ended, or that does not go on, did last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.observability.viewer.records import is_held
from strop.run import RunFolder
from strop.run.heartbeat import SUFFIX
from strop.utils.safe_read import open_regular, read_json

NOTABLE = (
    "resumed", "restarted", "engine_lost", "skipped_update", "health", "differing_request", "ledger_restored",
    "rollout_worker_lost", "rollout_worker_joined", "no_end_known", "crashed", "interrupted", "finished",
)  # fmt: skip
"""Kinds of events that are shown."""
_ENDS = {"crashed": "crashed", "interrupted": "was interrupted", "finished": "is finished"}
_MAX_EVENTS = 8
_SILENT_S = 5.0
"""A process that wrote so much earlier than the last one had stopped before it."""
_LOG_LINES = 25
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Records of the end of a run."""

    state: str
    """running, crashed, was interrupted, is finished; or `was killed`: it ended without a word."""
    step: int
    """Step of the last event."""
    phase: str
    """In which it ended, where it says so."""
    error: str
    """All that it said, with stacks of the processes that did not answer."""
    at: float
    """Last sign of life, in seconds since 1970."""
    beats: Sequence[Beat]
    """The last of each process, first the one that was silent first."""
    events: Sequence[Mapping[str, Any]]
    """The last notable events."""
    logs: Mapping[str, str]
    """Ends of the logs of processes that stopped before the others, by process."""


def look_into(folder: Path) -> Incident:
    """Read the last activity of a run.

    Raises:
        RunError: there is no run.
    """
    with RunFolder.open(folder, read_only=True) as run:
        events = run.events.read()
    last: Mapping[str, Any] = events[-1] if events else {"kind": "", "step": 0, "time": 0.0}
    beats = read_beats(folder / "logs")
    at = max([float(last["time"]), *(beat.at for beat in beats)])
    end: Mapping[str, Any] = last if last["kind"] in _ENDS else {}
    state = _ENDS[str(end["kind"])] if end else "was killed"
    if is_held(folder / "lock"):
        state = "is running"
    silent = [beat for beat in beats if at - beat.at > _SILENT_S and state != "is finished"]
    return Incident(
        state=state,
        step=int(last["step"]),
        phase=str(end.get("phase", "")),
        error=str(end.get("error", "")),
        at=at,
        beats=beats,
        events=[event for event in events if event["kind"] in NOTABLE][-_MAX_EVENTS:],
        logs={beat.process: tail for beat in silent if (tail := _tail(folder / "logs", beat.process))},
    )


def _tail(logs: Path, process: str) -> str:
    """The last lines of a log; "" where there is none, or something else than a file."""
    try:
        with open_regular(logs / f"{process}.log") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_LOG_LINES:])


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Last heartbeat of a process."""

    process: str
    """Name of its file: controller, or pool and rank."""
    pid: int
    host: str
    at: float
    """Time of the heartbeat, in seconds since 1970."""
    doing: str
    """From the whole to the part; empty between two things."""
    doing_s: float
    """Seconds that it had spent on that part."""
    num_items: int
    """Things that it waited for."""
    item: str
    """The one that it had waited for longest, and what it was doing with it; empty for none."""
    item_s: float
    """Seconds that it had spent on that item."""


def read_beats(logs: Path) -> list[Beat]:
    """The last of each process of a run, the one that was silent first in front; damaged files are left out."""
    beats: list[Beat] = []
    for file in sorted(logs.glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            beat = read_json(file)
            beats.append(
                Beat(
                    process=file.name.removesuffix(SUFFIX),
                    pid=int(beat["pid"]),
                    host=str(beat["host"]),
                    at=float(beat["at"]),
                    doing=str(beat["doing"]),
                    doing_s=float(beat["doing_s"]),
                    num_items=int(beat["num_items"]),
                    item=str(beat["item"]),
                    item_s=float(beat["item_s"]),
                )
            )
    return sorted(beats, key=lambda beat: beat.at)
