"""`strop incident`: what a run that ended, or that does not go on, did last."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strop.cli.settings import user_path
from strop.observability.viewer.records import is_held
from strop.run import RunFolder
from strop.run.heartbeat import SUFFIX
from strop.trainer.init_from.naming import run_in
from strop.utils.safe_read import open_regular, read_json
from strop.utils.terminal import print_json, print_plain, shorten

SUMMARY = "what a run that ended or hangs did last: each process, its slowest item, its stacks"
EPILOG = """\
examples:
  strop incident runs/first
  strop incident runs/first --json

For a run that goes on, ends or has ended. Each process writes every second what it does; one that died or hangs is
silent from then on and stands first. Processes that did not answer in time wrote the stacks of their threads into their
log. What happens when something dies is in docs/faults.md.
"""

NOTABLE = (
    "resumed", "restarted", "engine_lost", "skipped_update", "health", "differing_request", "ledger_restored",
    "no_end_known", "crashed", "interrupted", "finished",
)  # fmt: skip
"""Kinds of events that are shown."""
_ENDS = {"crashed": "crashed", "interrupted": "was interrupted", "finished": "is finished"}
_MAX_EVENTS = 8
_SILENT_S = 5.0
"""A process that wrote so much earlier than the last one had stopped before it."""
_LOG_LINES = 25
_TAIL_BYTES = 1 << 20
_SHOWN_CHARS = 160


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What is known of the end of a run."""

    state: str
    """running, crashed, was interrupted, is finished; or `was killed`: it ended without a word."""
    step: int
    """Of the last event."""
    phase: str
    """In which it ended, where it says so."""
    error: str
    """All that it said, with stacks of the processes that did not answer."""
    at: float
    """Last sign of life, in seconds since 1970."""
    beats: Sequence[Beat]
    """The last of each process, first the one that was silent first."""
    events: Sequence[Mapping[str, Any]]
    """The last notable ones."""
    logs: Mapping[str, str]
    """By process that stopped before the others, the end of its log."""


def look_into(folder: Path) -> Incident:
    """What a run did last.

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("run_a", metavar="RUN", type=user_path, help="run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    folder = run_in(args.run_a)
    found = look_into(folder)
    if args.json:
        print_json(asdict(found))
        return 0
    during = f", during {found.phase}" if found.phase else ""
    print_plain(f"{folder} {found.state} at step {found.step}{during}; last sign of life {_clock(found.at)}")
    if found.error:
        print_plain(f"\n{found.error}")
    if found.beats:
        print_plain("\nlast sign of each process, first the one that was silent first:")
    for beat in found.beats:
        print_plain(f"  {_line(beat, found.at)}")
    for process, tail in found.logs.items():
        print_plain(f"\nend of the log of {process}:\n{tail}")
    if found.events:
        print_plain("\nevents before:")
    for event in found.events:
        print_plain(f"  {_clock(float(event['time']))}  step {event['step']}  {_event(event)}")
    return 0


def _line(beat: Beat, at: float) -> str:
    before = at - beat.at
    when = f"{_clock(beat.at)}" + (f" ({before:.0f} s before the last one)" if before > 1.5 else "")
    words = f"{beat.process}  pid {beat.pid} on {beat.host}  {when}  {beat.doing or 'idle'}"
    words += f" for {beat.doing_s:.1f} s" if beat.doing else ""
    if beat.item:
        words += f"; of {beat.num_items} samples the slowest is {beat.item}, for {beat.item_s:.1f} s"
    return words


def _event(event: Mapping[str, Any]) -> str:
    told = [
        str(event[key])
        for key in ("cause", "error", "message", "reason", "request", "name")
        if event.get(key)
    ]
    return shorten(f"{event['kind']}{': ' if told else ''}{'; '.join(told)}", _SHOWN_CHARS)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a process wrote last."""

    process: str
    """Name of its file: controller, or pool and rank."""
    pid: int
    host: str
    at: float
    """When, in seconds since 1970."""
    doing: str
    """From the whole to the part; empty between two things."""
    doing_s: float
    """How long it had done that part."""
    num_items: int
    """Things that it waited for."""
    item: str
    """The one that it had waited for longest, and what it was doing with it; empty for none."""
    item_s: float
    """How long that had been there."""


def read_beats(logs: Path) -> list[Beat]:
    """The last of each process of a run, the one that was silent first in front; damaged files are left out."""
    found: list[Beat] = []
    for file in sorted(logs.glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            beat = read_json(file)
            found.append(
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
    return sorted(found, key=lambda beat: beat.at)
