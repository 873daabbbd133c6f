"""`strop plot`: curves of one or several runs as a picture."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.cli.settings import user_path
from strop.observability.viewer.curves import (
    AXES,
    PASS_RATE,
    REWARD,
    Axis,
    axis_of,
    column,
    first_column,
    metric_names,
    smoothed,
)
from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.summary import find_runs, name_of
from strop.utils.terminal import UsageError, check_writable, plain, print_json, print_plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUMMARY = "curves of one or several runs as a picture"
EPILOG = """\
examples:
  strop plot runs/arithmetic -o curve.png
  strop plot runs/a runs/b -o both.svg --x hours --smooth 10
  strop plot runs/a -o entropy.pdf --metric actor/entropy --metric 'val-core/*/acc/mean@*'

Without --metric: the reward, and the pass rate of validations (of a fine-tuning its losses). With * it is the mean of
all that match. --smooth N draws the mean of the last N steps, with the single steps behind it.
"""
FORMATS = ("png", "svg", "pdf")
_WIDTH, _HEIGHT, _DPI = 8.0, 3.6, 120  # inches of a panel, dots per inch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=user_path, help="run folders, or folders of runs"
    )
    parser.add_argument(
        "-o", "--out", required=True, metavar="FILE", type=user_path, help=f"picture: {', '.join(FORMATS)}"
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="what to draw, a panel each; may be repeated",
    )
    parser.add_argument("--x", choices=AXES, default="step", help="what to draw it against (default step)")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="mean of the last N steps (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    kind = args.out.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise UsageError(f"--out {args.out} is no picture that can be drawn: end it in {', '.join(FORMATS)}")
    if args.smooth < 1:
        raise UsageError(f"--smooth is {args.smooth}; use at least 1")
    found = find_runs(args.runs)
    if not found:
        raise UsageError(f"no run is below {', '.join(map(str, args.runs))}")
    records = [RunRecords(path) for path in found]
    for one in records:
        one.read_on()
    panels: list[Sequence[str]] = [[name] for name in args.metric] or [REWARD, PASS_RATE]
    _check_metrics(records, args.metric)
    check_writable(args.out)
    figure = figure_of_runs(records, panels, axis=args.x, smooth=args.smooth)
    figure.savefig(args.out, format=kind)
    if args.json:
        print_json({"picture": str(args.out), "runs": [str(one.path) for one in records]})
    else:
        print_plain(f"{args.out}: {len(records)} run{'s' * (len(records) != 1)}, against {args.x}")
    return 0


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
    kept = [panel for panel in drawn if any(values for _, _, values in panel)]
    if not kept:
        raise UsageError("these runs have no numbers to draw yet")
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(kept)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(len(kept), squeeze=False)[:, 0], kept, strict=True):
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


def _check_metrics(runs: Sequence[RunRecords], names: Sequence[str]) -> None:
    """Raise a UsageError, with near names, for a metric that no run has."""
    for name in names:
        if any(column(run, name) for run in runs):
            continue
        known = sorted({one for run in runs for one in metric_names(run)})
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"they have {', '.join(known[:12])}, ..."
        raise UsageError(f"--metric {name}: none of these runs has it; {hint}")
