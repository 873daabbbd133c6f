"""`strop plot`: curves of one or several runs as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from strop.cli.settings import user_path
from strop.observability.viewer.curves import AXES, PASS_RATE, REWARD
from strop.observability.viewer.plot import check_metrics, figure_of_runs
from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.summary import find_runs
from strop.utils.terminal import UsageError, check_writable, print_json, print_plain

SUMMARY = "plot curves of one or several runs"
EPILOG = """\
examples:
  strop plot runs/arithmetic -o curve.png
  strop plot runs/a runs/b -o both.svg --x hours --smooth 10
  strop plot runs/a -o entropy.pdf --metric actor/entropy --metric 'val-core/*/acc/mean@*'

Without --metric: the reward, and the pass rate of validations (of a fine-tuning its losses). With * it is the mean of
all that match. --smooth N draws the mean of the last N steps, with the single steps behind it.
"""
FORMATS = ("png", "svg", "pdf")


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
        help="metric to draw, a panel each; may be repeated",
    )
    parser.add_argument("--x", choices=AXES, default="step", help="x axis (default step)")
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
    folders = find_runs(args.runs)
    if not folders:
        raise UsageError(f"no run is below {', '.join(map(str, args.runs))}")
    records = [RunRecords(path) for path in folders]
    for record in records:
        record.read_on()
    panels: list[Sequence[str]] = [[name] for name in args.metric] or [REWARD, PASS_RATE]
    check_metrics(records, args.metric)
    check_writable(args.out)
    figure = figure_of_runs(records, panels, axis=args.x, smooth=args.smooth)
    figure.savefig(args.out, format=kind)
    if args.json:
        print_json({"picture": str(args.out), "runs": [str(record.path) for record in records]})
    else:
        print_plain(f"{args.out}: {len(records)} run{'s' * (len(records) != 1)}, against {args.x}")
    return 0
