"""Number of CPU threads for tensor operations of this process, and the reason for it.

Threads that share an operation wait for the last of them, so a core that another program keeps busy holds all of them
up; and operations of a small model are too short to share. So where nobody says how many there are, a short
measurement at the start decides, in favour of few. The number can change the last bits of results: a run records
it, and goes on with it when it is resumed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from strop.engines.config import ModelConfig
from strop.run import RunFolder
from strop.trainer.sections import MAX_THREADS, ResourcesConfig
from strop.utils.device import device_name
from strop.utils.machine_limits import usable_cores
from strop.utils.safe_read import read_json

EVENT = "threads"
"""Kind of the event in the log of a run."""
WORTH_IT = 1.2
"""Slowdown up to which fewer threads are preferred: so much do more of them lose at once where another program
comes up beside them."""
NUM_ROWS = 256
"""Tokens of a measured pass: as a decoding step of a few hundred sequences, or a short pack."""
MAX_WIDTH, MAX_INNER = 256, 1024
"""Sizes above which every operation is long enough to share; they keep a measured pass within tens of milliseconds."""
NUM_ROUNDS = 5
WINDOW_S = 0.02
"""Shortest time that one number is measured for in a round: longer than the turn that a scheduler gives a program."""


@dataclass(frozen=True, kw_only=True)
class Threads:
    """A number of threads in force."""

    count: int
    why: str
    """Reason for the number, for people."""

    def line(self) -> str:
        """For the person who watches."""
        return f"threads: {self.count} ({self.why})"


def set_threads(resources: ResourcesConfig, model: ModelConfig, *, recorded: int = 0) -> Threads:
    """Use this many CPU threads for tensor operations in this process.

    The first that there is: resources.num_threads; what the run recorded, on a machine with that many cores;
    OMP_NUM_THREADS; a measurement. With an accelerator, or with the roles in processes of their own, there is nothing
    to measure here, and it is all cores.

    Args:
        resources: its num_threads, runtime and device.
        model: whose sizes are measured.
        recorded: number that the run had before; 0: none.
    """
    threads = _decide(resources, model, recorded)
    torch.set_num_threads(threads.count)
    return threads


def set_threads_of_run(
    resources: ResourcesConfig, model: ModelConfig, run: RunFolder, *, step: int
) -> Threads:
    """As `set_threads`; a number that no setting names is recorded in the run, which keeps it.

    Args:
        resources, model: as of `set_threads`.
        run: the folder of the run.
        step: at which it begins or goes on.
    """
    events = run.events.read(EVENT)
    recorded = int(events[-1]["count"]) if events else 0
    threads = set_threads(resources, model, recorded=recorded)
    if not resources.num_threads and threads.count != recorded:
        run.events.append(EVENT, step, count=threads.count, why=threads.why)
    return threads


def _decide(resources: ResourcesConfig, model: ModelConfig, recorded: int) -> Threads:
    if resources.num_threads:
        return Threads(count=resources.num_threads, why="resources.num_threads")
    cores = usable_cores()
    if 0 < recorded <= cores:
        return Threads(count=recorded, why="as this run began")
    variable = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if variable.isdecimal() and int(variable):
        return Threads(count=min(int(variable), MAX_THREADS), why="OMP_NUM_THREADS")
    if cores == 1 or resources.runtime != "inline" or device_name(resources.device) != "cpu":
        return Threads(count=cores, why="all cores")
    seconds = measure(sorted({1, max(cores // 2, 1), cores}), *_sizes(model))
    count = fewest(seconds)
    listed = ", ".join(f"{1000 * took:.1f} ms with {number}" for number, took in seconds.items())
    return Threads(count=count, why=f"a pass of the model's sizes took {listed}")


def fewest(seconds: dict[int, float]) -> int:
    """The fewest threads that are not much slower than the fastest.

    Args:
        seconds: of the same work, by number of threads.
    """
    limit = WORTH_IT * min(seconds.values())
    return min(count for count, took in seconds.items() if took <= limit)


def measure(counts: Sequence[int], width: int, inner: int) -> dict[int, float]:
    """Seconds of a forward and a backward pass through a layer, by number of threads; the median of several rounds.

    Args:
        counts: numbers of threads.
        width, inner: sizes of the layer.
    """
    before = torch.get_num_threads()
    states = torch.full((NUM_ROWS, width), 0.5, requires_grad=True)  # [N, D]
    up, down = (torch.full(shape, 0.01, requires_grad=True) for shape in ((width, inner), (inner, width)))
    took: dict[int, list[float]] = {count: [] for count in counts}
    try:
        for _ in range(NUM_ROUNDS):
            for count in counts:  # in turn, so that what else the machine does meets all of them
                torch.set_num_threads(count)
                start, passes = time.perf_counter(), 0
                while passes == 0 or time.perf_counter() - start < WINDOW_S:
                    hidden = torch.nn.functional.silu(states @ up) @ down  # [N, D]
                    torch.autograd.grad((states + hidden).square().mean(), (states, up, down))
                    passes += 1
                took[count].append((time.perf_counter() - start) / passes)
    finally:
        torch.set_num_threads(before)
    return {count: median(times) for count, times in took.items()}


def _sizes(model: ModelConfig) -> tuple[int, int]:
    """Width and inner width of a layer, from the settings of the model folder; of a large one where they do not say."""
    try:
        settings = read_json(Path(model.path) / "config.json")
    except (OSError, ValueError):  # loading the model says what is wrong with it
        settings = None
    settings = settings if isinstance(settings, dict) else {}
    text = settings.get("text_config")
    settings = {**settings, **(text if isinstance(text, dict) else {})}
    width, inner = (settings.get(name) for name in ("hidden_size", "intermediate_size"))
    width = min(width, MAX_WIDTH) if isinstance(width, int) and width > 0 else MAX_WIDTH
    return width, min(inner, MAX_INNER) if isinstance(inner, int) and inner > 0 else min(4 * width, MAX_INNER)
