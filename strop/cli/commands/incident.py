"""`strop incident`: what a run that ended, or that does not go on, did last."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from strop.cli.settings import user_path
from strop.observability.viewer.postmortem import Beat, look_into
from strop.run.naming import run_in
from strop.utils.terminal import print_json, print_plain, shorten

SUMMARY = "show the last activity of a run that ended or hangs: each process, its slowest item, its stacks"
EPILOG = """\
examples:
  strop incident runs/first
  strop incident runs/first --json

For a run that goes on, ends or has ended. Each process writes every second what it does; one that died or hangs is
silent from then on and stands first. Processes that did not answer in time wrote the stacks of their threads into their
log. What happens when something dies is in docs/faults.md.
"""

_SHOWN_CHARS = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("run_a", metavar="RUN", type=user_path, help="run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    folder = run_in(args.run_a)
    incident = look_into(folder)
    if args.json:
        print_json(asdict(incident))
        return 0
    during = f", during {incident.phase}" if incident.phase else ""
    print_plain(
        f"{folder} {incident.state} at step {incident.step}{during}; last sign of life {_clock(incident.at)}"
    )
    if incident.error:
        print_plain(f"\n{incident.error}")
    if incident.beats:
        print_plain("\nlast sign of each process, first the one that was silent first:")
    for beat in incident.beats:
        print_plain(f"  {_line(beat, incident.at)}")
    for process, tail in incident.logs.items():
        print_plain(f"\nend of the log of {process}:\n{tail}")
    if incident.events:
        print_plain("\nevents before:")
    for event in incident.events:
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
    parts = [
        str(event[key])
        for key in ("cause", "error", "message", "reason", "request", "name")
        if event.get(key)
    ]
    return shorten(f"{event['kind']}{': ' if parts else ''}{'; '.join(parts)}", _SHOWN_CHARS)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
