"""Costs of services of the reward, counted around each rollout call over all starts and processes of a run.

The amounts lie in the run folder, in a file of its own: money that was spent after a checkpoint stays spent when the
run is rolled back to it. It is brought up to date after each call that plays prompts; what a call had spent that was
cut off by a crash is not known and not counted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from strop.controller import WorkerGroup, as_list
from strop.rewards.config import RewardConfig
from strop.run import RunError
from strop.utils.atomic_io import replace_text
from strop.utils.safe_read import read_json
from strop.workers.rollout import RolloutWorker

SPENDING_FILE = "spending.json"


class CostTracker:
    """The costs of one run, by service."""

    def __init__(self, reward: RewardConfig, folder: Path | None) -> None:
        """Args:
        reward: of the run; of its services, those that have a price are counted.
        folder: of the run; None where there is none, and nothing to remember.

        Raises:
            RunError: the file of an earlier start is damaged.
        """
        priced = [name for name, service in reward.services.items() if service.has_price]
        self._file = None if folder is None or not priced else folder / SPENDING_FILE
        self.totals = dict.fromkeys(priced, 0.0)
        """Spent by the run, by the name of the service; empty where nothing has a price."""
        self._seen = Counter[str]()
        if self._file is not None and self._file.is_file():
            self.totals = {name: _read(self._file, name) for name in priced}

    def before_rollout(self, rollout: WorkerGroup[RolloutWorker]) -> None:
        """Set the costs of the run in the workers, before they generate."""
        if self.totals:
            rollout.call.set_cost(self.totals)

    def after_rollout(self, rollout: WorkerGroup[RolloutWorker]) -> None:
        """Add the costs of the workers since the last call."""
        if self.totals:
            costs = as_list(rollout.call.cost())
            now = {name: math.fsum(cost[name] for cost in costs) for name in self.totals}
            self.add({name: now[name] - self._seen[name] for name in now})
            self._seen = Counter(now)

    def add(self, costs: Mapping[str, float]) -> None:
        """Count an amount of each service.

        Raises:
            RunError: it could not be written down.
        """
        if not any(costs.values()):
            return
        self.totals = {name: total + costs[name] for name, total in self.totals.items()}
        if self._file is None:
            return
        try:
            replace_text(self._file, json.dumps(self.totals) + "\n")
        except OSError as error:
            raise RunError(
                f"cannot write {self._file}: {error.strerror}; free space or check the disk"
            ) from error


def _read(file: Path, name: str) -> float:
    """Cost of a service in the file of an earlier start."""
    try:
        total = read_json(file)[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} cannot be read ({type(error).__name__}: {error}); it says what the {name} has cost the run: write "
            f'{{"{name}": AMOUNT}} into it'
        ) from error
    if (
        isinstance(total, bool)
        or not isinstance(total, (int, float))
        or not (math.isfinite(total) and total >= 0)
    ):
        raise RunError(
            f"{file} says that the {name} has cost {total!r}; write an amount of at least 0 into it"
        )
    return float(total)
