"""Progress on the terminal: a bar with the time left, and one line of the numbers people watch.

On a terminal a thread of rich redraws the bar, so that the clock runs during long steps; `log` only hands
it the numbers. Elsewhere (a file, a pipe) there is no thread: plain lines, at most one per period.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from strop.observability.reward_curve import matching
from strop.observability.trackers.setup import TrackerSetup

PERIOD_S = 1.0
"""Shortest time between two plain lines, in seconds."""
NOTE_PERIOD_S = 30.0
"""Shortest time between a plain line and the next one about a step that goes on, in seconds."""

_ETA_STEPS = 20  # steps that the estimate of the time left looks back on: enough to even out validation steps


@dataclass(frozen=True)
class Headline:
    """One number of the line: its label and the metrics it comes from."""

    label: str
    patterns: tuple[str, ...]
    """Metric names, best first, with * for any text; several names that match one pattern are averaged."""
    form: str
    """Format of the number."""
    unless: str = ""
    """A metric in whose presence it is left out."""


HEADLINES = (
    Headline("loss", ("train/loss", "prefer/loss"), ".4f"),
    Headline("accuracy", ("prefer/rewards/accuracies",), ".1%"),
    Headline("reward", ("critic/rewards/mean", "critic/score/mean"), ".3f"),
    Headline("pass", ("val-core/pass_rate",), ".1%"),
    Headline("validation reward", ("val-core/mean_reward",), ".3f", unless="val-core/pass_rate"),
    Headline("entropy", ("actor/entropy",), ".3f"),
    Headline("length", ("response_length/mean",), ".1f"),
    Headline("tok/s", ("perf/throughput",), ",.0f"),
)
"""The numbers of the line, in order. One that a run does not log is left out."""


class ConsoleTracker:
    """Progress of the run: step, time left, and the latest headline numbers.

    Args:
        setup: where to draw; a bar if it is a terminal, plain lines if not.
        clock: seconds that only grow.
    """

    def __init__(self, setup: TrackerSetup, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._label, self._console = setup.total_steps, setup.label, setup.console
        self._clock, first_step = clock, setup.resume_step
        self._latest: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._marks: deque[tuple[int, float]] = deque([(first_step, clock())], maxlen=_ETA_STEPS + 1)
        self._printed_at = -math.inf
        self._noted_at = clock()
        self._pending = self._printed = ""
        self._bar = (
            _Bar(self._label, self._total, first_step, self._console) if self._console.is_terminal else None
        )

    @staticmethod
    def check() -> None:
        """Nothing is missing: rich comes with strop."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step."""
        now = self._clock()
        if step > self._marks[-1][0]:
            self._marks.append((step, now))
        self._latest.update(metrics)
        self._steps.update(dict.fromkeys(metrics, step))
        numbers, eta = headline(self._latest, of_steps=self._steps, step=step), self._eta()
        if self._bar:
            self._bar.show(step, numbers, eta)
            return
        line = f"{self._label} step {step}/{self._total}  {numbers}  eta {eta}".replace("    ", "  ")
        self._pending = (
            line if line != self._printed else ""
        )  # a late number of the step may change nothing here
        if now - self._printed_at >= PERIOD_S or step >= self._total:
            self._print_pending()

    def note(self, text: str) -> None:
        """Show how far the step is that goes on: beside the bar until the step ends, or on a line now and then."""
        step = self._marks[-1][0]
        if self._bar:
            self._bar.show(step, text, self._eta())
        elif self._clock() - max(self._noted_at, self._printed_at) >= NOTE_PERIOD_S:
            self._noted_at = self._clock()
            self._print(f"{self._label} after step {step}/{self._total}  {text}")

    def close(self) -> None:
        """Leave the last state on the screen; a second call does nothing."""
        if self._bar:
            self._bar.stop()
        self._print_pending()

    def _print_pending(self) -> None:
        if self._pending:
            self._print(self._pending)
            self._printed, self._printed_at, self._pending = self._pending, self._clock(), ""

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _eta(self) -> str:
        (first, start), (last, end) = self._marks[0], self._marks[-1]
        if last == first:
            return "-:--:--"
        return duration((end - start) / (last - first) * max(self._total - last, 0))


class _Bar:
    """The live display of a terminal."""

    def __init__(self, label: str, total_steps: int, first_step: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task(label, total=total_steps, completed=first_step, eta="-:--:--")
        self._line = Text("")
        self._live = Live(Group(self._progress, self._line), console=console, refresh_per_second=4)
        self._live.start()

    def show(self, step: int, numbers: str, eta: str) -> None:
        self._progress.update(self._task, completed=step, eta=eta)
        self._line.plain = numbers
        self._live.refresh()

    def stop(self) -> None:
        self._live.stop()


def headline(
    metrics: Mapping[str, float], *, of_steps: Mapping[str, int] | None = None, step: int | None = None
) -> str:
    """The headline numbers as one line: "reward 0.531  pass 62.5% (step 20)  entropy 0.410".

    Args:
        metrics: latest value of each metric.
        of_steps: step of each metric; a number that is older than `step` shows its own.
        step: step of the line.
    """
    parts = []
    for entry in HEADLINES:
        names = matching(metrics, entry.patterns)
        if names and entry.unless not in metrics:
            number = format(sum(metrics[name] for name in names) / len(names), entry.form)
            text = f"{number} {entry.label}" if entry.label == "tok/s" else f"{entry.label} {number}"
            known_at = max((of_steps or {}).get(name, step or 0) for name in names)
            is_old = step is not None and known_at < step
            parts.append(f"{text} (step {known_at})" if is_old else text)
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as "h:mm:ss"."""
    total_s = round(seconds)
    return f"{total_s // 3600}:{total_s // 60 % 60:02d}:{total_s % 60:02d}"
