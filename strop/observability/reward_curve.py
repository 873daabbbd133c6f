"""The curve of a run, as text for the terminal and as a PNG."""

from __future__ import annotations

import fnmatch
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.observability.trackers.setup import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 60, 13
"""Columns and rows of the plot itself, without axes; an odd height gives the middle of the range a row."""

PASSES, VALIDATION_REWARD = "pass rate", "mean reward of validation"
_CURVES = (
    ("reward", ("critic/rewards/mean", "critic/score/mean"), True),
    (PASSES, ("val-core/pass_rate", "val-core/*/acc/mean@*"), False),
    (VALIDATION_REWARD, ("val-core/mean_reward", "val-core/*/reward/mean@*"), False),
)
"""Name, metrics and whether it is drawn as a line: rewards come every step, pass rates now and then. The metrics by
data source are those of runs that have no number of the whole validation."""

_MIN_LABEL_COLUMNS = 7
_DPI = 120  # a picture of 960 x 480 pixels


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity over the steps of a run. Points that are not finite are left out."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    is_line: bool = True
    """Drawn as a line; False draws a mark per point."""

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values):
            raise ValueError(
                f"series {self.name!r} has {len(self.steps)} steps and {len(self.values)} values; give one "
                f"value per step"
            )

    def points(self) -> list[tuple[int, float]]:
        """The finite points, by step."""
        pairs = zip(self.steps, self.values, strict=True)
        return sorted((step, value) for step, value in pairs if math.isfinite(value))


def curve_of_run(folder: Path) -> str:
    """Reward and pass rate of a run as lines of text; empty where its metrics were not kept.

    Args:
        folder: of the run.
    """
    metrics = folder / METRICS_FILE
    if not metrics.is_file():  # the tracker that writes it can be switched off
        return ""
    return text_curve(run_series(read_metrics(metrics))) + "\n"


def run_series(metrics: Iterable[Mapping[str, float]]) -> list[Series]:
    """Reward and pass rate of a run, as far as it has them; the mean reward of validations where no pass rate is known.

    Args:
        metrics: one mapping per step with the key "step", as `read_metrics` gives them.
    """
    records = list(metrics)
    curves: list[Series] = []
    for name, patterns, is_line in _CURVES:
        points = [(int(record["step"]), find(record, patterns)) for record in records]
        pairs = [(step, value) for step, value in points if value is not None]
        if name == PASSES and not _are_rates(records, [value for _, value in pairs]):
            continue
        if name == VALIDATION_REWARD and any(curve.name == PASSES for curve in curves):
            continue
        if pairs:
            steps, values = zip(*pairs, strict=True)
            curves.append(Series(name=name, steps=steps, values=values, is_line=is_line))
    return curves


def _are_rates(records: Sequence[Mapping[str, float]], values: Sequence[float]) -> bool:
    """True if these numbers of validations are pass rates: each has one; of older runs, they are between 0 and 1."""
    validated = [record for record in records if "val-core/mean_reward" in record]
    if validated:
        return all("val-core/pass_rate" in record for record in validated)
    return all(0 <= value <= 1 for value in values)


def text_curve(series: Sequence[Series], *, width: int = WIDTH, height: int = HEIGHT) -> str:
    """The curves as text on one pair of axes, with a legend; a sentence when there is no point.

    Where several steps fall into one column, the column shows their mean.

    Args:
        series: the first line series is drawn as a line, the others as marks on top of it.
        width: columns of the plot, at least 10.
        height: rows of the plot, at least 3.
    """
    if width < 10 or height < 3:
        raise ValueError(f"a curve of {width} x {height} cannot be read; use at least 10 columns and 3 rows")
    drawn = [curve for curve in series if curve.points()]
    if not drawn:
        return "no points to draw yet"
    steps = [step for curve in drawn for step, _ in curve.points()]
    values = [value for curve in drawn for _, value in curve.points()]
    axes = _Axes(min(steps), max(steps), *_padded_range(min(values), max(values)), width, height)
    grid = [[" "] * width for _ in range(height)]
    marks = _marks(drawn)
    for curve, mark in sorted(zip(drawn, marks, strict=True), key=lambda pair: not pair[0].is_line):
        columns = _columns(curve, axes)
        if curve.is_line:
            _draw_line(grid, columns, axes, mark)
        else:
            for column, value in columns:
                grid[axes.row(value)][column] = mark
    legend = "   ".join(f"{mark} {curve.name}" for curve, mark in zip(drawn, marks, strict=True))
    return "\n".join(_framed(grid, axes, legend))


def save_curve(path: Path, series: Sequence[Series], *, title: str) -> Path:
    """Draw the curves as a PNG, without a display.

    Raises:
        OSError: the file cannot be written.
    """
    figure = figure_of(series, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def figure_of(series: Sequence[Series], *, title: str) -> Figure:
    """The curves as a figure of matplotlib, which belongs to no window; a notebook shows it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            self.savefig(content, format="png")
            return content.getvalue()

    figure = Shown(figsize=(8, 4), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve in series:
        steps = [step for step, _ in curve.points()]
        values = [value for _, value in curve.points()]
        axes.plot(
            steps, values, "-" if curve.is_line else "o-", label=curve.name, linewidth=1.5, markersize=5
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=title, xlabel="step")
    axes.grid(alpha=0.3)
    if any(curve.points() for curve in series):
        axes.legend()
    return figure


@dataclass(frozen=True)
class _Axes:
    first_step: int
    last_step: int
    low: float
    high: float
    width: int
    height: int

    def column(self, step: int) -> int:
        span = max(self.last_step - self.first_step, 1)
        return round((step - self.first_step) / span * (self.width - 1))

    def row(self, value: float) -> int:
        """Row of a value; row 0 is the top."""
        return round((self.high - value) / (self.high - self.low) * (self.height - 1))


def _padded_range(low: float, high: float) -> tuple[float, float]:
    """A range of more than one point with round ends; values within 0 and 1 that fill most of it get exactly that."""
    if low >= 0 and high <= 1 and high - low >= 0.5:
        return 0.0, 1.0
    unit = 10.0 ** math.floor(math.log10(high - low)) / 2 if high > low else 0.0
    if unit and abs(low) < 1e6 * unit and abs(high) < 1e6 * unit:  # else the rounding is in the last digits
        return math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    if high > low:
        return low, high
    if low == 0:
        return 0.0, 1.0
    pad = abs(low) * 0.1 or 1.0
    return low - pad, high + pad


def _marks(series: Sequence[Series]) -> list[str]:
    lines, points = iter("─━═"), iter("●◆▲■")
    return [next(lines, "·") if curve.is_line else next(points, "+") for curve in series]


def _columns(series: Series, axes: _Axes) -> list[tuple[int, float]]:
    """Mean value per column that has points, from left to right."""
    cells: dict[int, list[float]] = {}
    for step, value in series.points():
        cells.setdefault(axes.column(step), []).append(value)
    return [(column, sum(values) / len(values)) for column, values in sorted(cells.items())]


def _draw_line(grid: list[list[str]], columns: list[tuple[int, float]], axes: _Axes, mark: str) -> None:
    """Join the columns by straight pieces: level strokes, and corners where it climbs or falls."""
    before: int | None = None
    for column, value in _filled(columns):
        row = axes.row(value)
        if before is None or before == row:
            grid[row][column] = mark
        else:
            climbs = row < before
            for between in range(min(row, before) + 1, max(row, before)):
                grid[between][column] = "│"
            grid[before][column] = "╯" if climbs else "╮"
            grid[row][column] = "╭" if climbs else "╰"
        before = row


def _filled(columns: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """A value for every column between the first and the last point, on straight lines between points."""
    filled = columns[:1]
    for (left, low), (right, high) in itertools.pairwise(columns):
        for column in range(left + 1, right + 1):
            filled.append((column, low + (high - low) * (column - left) / (right - left)))
    return filled


def _framed(grid: list[list[str]], axes: _Axes, legend: str) -> list[str]:
    """The rows between legend and step axis, with a value axis on the left."""
    step_per_row = (axes.high - axes.low) / (axes.height - 1)
    labels = {}
    for row in (0, axes.height // 2, axes.height - 1):
        value = axes.high - row * step_per_row
        is_zero = abs(value) < (axes.high - axes.low) / 1000  # a rounding error beside the range
        labels[row] = "0" if is_zero else f"{value:.3g}"
    columns = max(_MIN_LABEL_COLUMNS, *map(len, labels.values()))
    lines = [" " * (columns + 2) + legend]
    for row, cells in enumerate(grid):
        axis = f"{labels[row]:>{columns}} ┤" if row in labels else " " * columns + " │"
        lines.append((axis + "".join(cells)).rstrip())
    lines.append(" " * columns + " └" + "─" * axes.width)
    first, last = str(axes.first_step), f"step {axes.last_step}"
    gap = max(axes.width - len(first) - len(last), 1)
    lines.append(" " * (columns + 2) + first + " " * gap + last)
    return lines


def find(metrics: Mapping[str, float], patterns: tuple[str, ...]) -> float | None:
    """Mean of the metrics that match the first pattern with a match; None when no pattern has one."""
    names = matching(metrics, patterns)
    return sum(metrics[name] for name in names) / len(names) if names else None


def matching(metrics: Mapping[str, float], patterns: tuple[str, ...]) -> list[str]:
    """Names of the metrics that match the first pattern with a match."""
    for pattern in patterns:
        if names := [name for name in metrics if fnmatch.fnmatchcase(name, pattern)]:
            return names
    return []
