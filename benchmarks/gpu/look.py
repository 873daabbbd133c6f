"""One step's settings: its device, the time that is left, and where its measurements go."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from strop.utils.triton import KernelError

Facts = dict[str, Any]
"""Numbers and words of a measurement, by name."""
T = TypeVar("T")

H100_RATES = {"bf16_tflops": 770.0, "copy_tb_per_s": 3.0}
"""Measured on one, for devices whose own were not."""

ROOT = Path(__file__).resolve().parents[2]


class Look:
    """A step that runs."""

    def __init__(self, *, device: str, out: Path, step: str, deadline: float) -> None:
        """Args:
        device: `cuda`, or `cpu` for a rehearsal with toys.
        out: folder of all results.
        step: its name.
        deadline: time at which the step is stopped.
        """
        self.device, self.out, self.step = device, out, step
        self._deadline = deadline
        self.num_failed = 0
        """Measurements that raised."""

    @property
    def is_rehearsal(self) -> bool:
        """On a CPU: whether every line of the step runs."""
        return self.device == "cpu"

    @property
    def work(self) -> Path:
        """Folder of models and runs, which all steps share."""
        return self.out / "work"

    @property
    def left_s(self) -> float:
        """Seconds until the step is stopped."""
        return self._deadline - time.time()

    def size(self, real: int, toy: int) -> int:
        """`real` on a card, `toy` in a rehearsal."""
        return toy if self.is_rehearsal else real

    def measure(self, what: str, work: Callable[[Facts], None], *, needs_s: float = 0.0) -> None:
        """Write the facts that `work` collects, or why it failed, or that there was no time for it.

        The one place that catches whatever a measurement raises: the rest of the step goes on.
        """
        facts: Facts = {}
        begin = time.perf_counter()
        if self.left_s < needs_s:
            self._write(what, {"skipped": f"{self.left_s:.0f} s are left, it needs about {needs_s:.0f}"})
            return
        try:
            work(facts)
        except Exception as error:  # noqa: BLE001
            self.num_failed += 1
            traceback.print_exc()
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            facts["error"] = f"{type(error).__name__}: {str(error)[:600]}"
            facts["at"] = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        self._write(what, facts | {"took_s": round(time.perf_counter() - begin, 1)})
        self.clean()

    def skip(self, what: str, why: str) -> None:
        """Say that something is not measured here."""
        self._write(what, {"skipped": why})

    def sync(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def clean(self) -> None:
        """Give memory of what has ended back."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def attempt(self, work: Callable[[], T]) -> T | str:
        """The result, or the error of one of several ways of which some exist on some cards alone."""
        try:
            return work()
        except (RuntimeError, ImportError, KernelError) as error:
            self.clean()
            return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"

    def ceilings(self, facts: Facts) -> dict[str, float]:
        """Rates of this device that the step env of the same call measured, and those of an H100 in place of others,
        which `facts` then say."""
        measured: dict[str, float] = {}
        file = self.out / "env.jsonl"
        for line in file.read_text().splitlines() if file.is_file() else []:
            row = json.loads(line)
            if row["what"] == "ceilings":
                measured |= {name: row[name] for name in H100_RATES if name in row}
        if assumed := {name: rate for name, rate in H100_RATES.items() if name not in measured}:
            facts["rates_of_an_h100"] = assumed
        return H100_RATES | measured

    def _write(self, what: str, facts: Facts) -> None:
        line = json.dumps({"what": what, **facts}, default=str)
        with (self.out / f"{self.step}.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
