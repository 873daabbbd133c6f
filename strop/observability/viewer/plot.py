"""Curves of one or several runs as a picture."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.observability.viewer.curves import (
    Axis,
    axis_of,
    column,
    first_column,
    metric_names,
    smoothed,
)
from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.summary import name_of
from strop.utils.terminal import UsageError, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _DPI = 8.0, 3.6, 120  # inches of a panel, dots per inch


def figure_of_runs(
    runs: Sequence[RunRecords], panels: Sequence[Sequence[str]], *, axis: Axis = "step", smooth: int = 1
) -> Figure:
    """A panel for each quantity, in each a line per run; a panel that no run has anything for is left out.

    Args:
        runs: their records.
        panels: for each panel the names of the quantity, of which a run's first is drawn.
        axis: what it is drawn against.
        smooth: mean over so many steps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [[(run, *first_column(run, patterns)) for run in runs] for patterns in panels]
    panels_with_values = [panel for panel in drawn if any(values for _, _, values in panel)]
    if not panels_with_values:
        raise UsageError("these runs have no numbers to draw yet")
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(panels_with_values)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(
        figure.subplots(len(panels_with_values), squeeze=False)[:, 0], panels_with_values, strict=True
    ):
        names = dict.fromkeys(name for _, name, values in panel if values)
        for number, (run, _, values) in enumerate(panel):
            if values:
                _draw(axes, run, values, axis=axis, smooth=smooth, colour=f"C{number % 10}")
        axes.set(xlabel=axis, ylabel=" or ".join(names))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def _draw(
    axes: Axes, run: RunRecords, values: dict[int, float], *, axis: Axis, smooth: int, colour: str
) -> None:
    places = axis_of(run, axis)
    across = [places[step] for step in values]
    label = plain(name_of(run.path), is_one_line=True).replace("$", r"\$")
    is_sparse = len(values) < len(places) / 2
    if smooth > 1 and not is_sparse:
        axes.plot(across, list(values.values()), color=colour, linewidth=0.8, alpha=0.25)
        values = smoothed(values, smooth)
    style = "o-" if is_sparse else "-"
    axes.plot(across, list(values.values()), style, color=colour, linewidth=1.5, markersize=4, label=label)


def check_metrics(runs: Sequence[RunRecords], names: Sequence[str]) -> None:
    """Raise a UsageError, with near names, for a metric that no run has."""
    for name in names:
        if any(column(run, name) for run in runs):
            continue
        metrics_of_runs = sorted({metric for run in runs for metric in metric_names(run)})
        near = difflib.get_close_matches(name, metrics_of_runs, n=3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"they have {', '.join(metrics_of_runs[:12])}, ..."
        )
        raise UsageError(f"--metric {name}: none of these runs has it; {hint}")
