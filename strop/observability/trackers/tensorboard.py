"""Metrics as event files for TensorBoard, written in this thread.

The writer of the tensorboard package writes in a thread of its own, which ends with a traceback on the terminal when
the disk refuses, and then blocks or fails whoever writes or closes. Here the step that cannot be written says so.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.observability.trackers.setup import TrackerSetup

_NAME = re.compile(r"^events\.out\.tfevents\.(\d+)\.")
_ILLEGAL = re.compile(r"[^-/\w.]")


class TensorBoardTracker:
    """Metrics as TensorBoard scalars; a resume tells TensorBoard to forget the steps it repeats."""

    def __init__(self, setup: TrackerSetup) -> None:
        """Begin a file in `tensorboard/` of the run folder.

        Raises:
            OSError: the disk refused.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder, resume_step = setup.folder / "tensorboard", setup.resume_step
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _new_file(folder).open("xb")
        self._records = RecordWriter(self._file)
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if resume_step > 0:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    @staticmethod
    def check() -> None:
        """Raise a ValueError where the package tensorboard is missing."""
        try:
            import tensorboard.compat.proto.event_pb2
            import tensorboard.summary.writer.record_writer  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "the tracker 'tensorboard' needs the package tensorboard: pip install tensorboard, or take "
                "'tensorboard' out of trainer.trackers"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point per metric; they are in the file when this returns.

        Raises:
            OSError: the disk refused.
        """
        points = [
            self._summary.Value(tag=_ILLEGAL.sub("_", name).lstrip("/"), simple_value=float(value))
            for name, value in metrics.items()
        ]
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=points)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()


def _new_file(folder: Path) -> Path:
    """TensorBoard reads files in the order of their names, so each is later than those before, whatever the clock."""
    earlier = [int(match[1]) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    second = max([int(time.time()), *(time_of_file + 1 for time_of_file in earlier)])
    return folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.0"
