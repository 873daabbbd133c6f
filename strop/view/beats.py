"""What the processes of a run wrote last of what they do (strop.base.heartbeat)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from strop.base.foreign_files import read_json
from strop.base.heartbeat import SUFFIX


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
