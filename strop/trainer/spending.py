"""What the judge has cost a run, over all its starts and processes: what reward.judge.max_cost is compared with.

The amount lies in the run folder, in a file of its own: money that was spent after a checkpoint stays spent when the
run is rolled back to it. It is brought up to date after each call that plays prompts; what a call had spent that was
cut off by a crash is not known and not counted.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from strop.base.foreign_files import read_json
from strop.controller import as_list
from strop.judges.config import JudgeConfig
from strop.run import RunError
from strop.run.durable import replace_text

if TYPE_CHECKING:
    from strop.controller import WorkerGroup
    from strop.workers.rollout import RolloutWorker

SPENDING_FILE = "spending.json"


class Spending:
    """The judge's costs of one run."""

    def __init__(self, judge: JudgeConfig, folder: Path | None) -> None:
        """Args:
        judge: of the run.
        folder: of the run; None where there is none, and nothing to remember.

        Raises:
            RunError: the file of an earlier start is damaged.
        """
        self._is_counted = bool(judge.base_url) and judge.has_price
        self._file = None if folder is None or not self._is_counted else folder / SPENDING_FILE
        self.total = 0.0
        """Spent by the run."""
        self._seen = 0.0
        if self._file is not None and self._file.is_file():
            self.total = _read(self._file)

    def before(self, rollout: WorkerGroup[RolloutWorker]) -> None:
        """Let the workers know, before they play, what is spent."""
        if self._is_counted:
            rollout.call.tell_spent(self.total)

    def after(self, rollout: WorkerGroup[RolloutWorker]) -> None:
        """Count what the workers have spent since the last call."""
        if self._is_counted:
            now = math.fsum(as_list(rollout.call.spent()))
            self.add(now - self._seen)
            self._seen = now

    def add(self, cost: float) -> None:
        """Count an amount.

        Raises:
            RunError: it could not be written down.
        """
        if not cost:
            return
        self.total += cost
        if self._file is None:
            return
        try:
            replace_text(self._file, json.dumps({"judge": self.total}) + "\n")
        except OSError as error:
            raise RunError(
                f"cannot write {self._file}: {error.strerror}; free space or check the disk"
            ) from error


def _read(file: Path) -> float:
    try:
        total = read_json(file)["judge"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} cannot be read ({type(error).__name__}: {error}); it says what the judge has cost the run: write "
            f'{{"judge": AMOUNT}} into it'
        ) from error
    if (
        isinstance(total, bool)
        or not isinstance(total, (int, float))
        or not (math.isfinite(total) and total >= 0)
    ):
        raise RunError(
            f"{file} says that the judge has cost {total!r}; write an amount of at least 0 into it"
        )
    return float(total)
