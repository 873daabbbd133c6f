"""`strop runs`: all runs below a folder, in one table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.settings import user_path
from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.summary import (
    RunSummary,
    differing_settings,
    find_runs,
    flattened,
    summary_of,
)
from strop.run import RunError
from strop.utils.terminal import number_text, plain, print_json, print_plain, rate_text, say, shorten

if TYPE_CHECKING:
    from rich.table import Table

SUMMARY = "list all runs below a folder: state, results and differing settings"
EPILOG = """\
examples:
  strop runs
  strop runs runs/sweep --json
  strop plot runs/a runs/b -o both.png

device-hours are the time of all steps, times the processes of the run. `strop view` shows the same in a browser.
"""

DEFAULT_FOLDER = Path("runs")
_MAX_SETTINGS = 4
_SHOWN_CHARS = 40
_WIDTH, _UNBOUND = 160, 10_000
"""Widths of the table: where there is no terminal, and without a bound."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "paths", nargs="*", metavar="DIR", type=user_path, help="folders of runs, or runs (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    records = read_runs(args.paths or [DEFAULT_FOLDER])
    summaries = [summary_of(run_records) for run_records in records]
    keys = differing_settings([run_records.config for run_records in records])
    settings = [settings_of(run_records.config, keys) for run_records in records]
    if args.json:
        runs = [
            {**asdict(run_records), "settings": its}
            for run_records, its in zip(summaries, settings, strict=True)
        ]
        print_json({"runs": runs, "differing_settings": keys})
        return 0
    if not summaries:
        print_plain(f"no run below {', '.join(map(str, args.paths or [DEFAULT_FOLDER]))}")
        return 0
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for count in range(min(len(keys), _MAX_SETTINGS), -1, -1):  # as many settings as can be read
        grid = table(summaries, settings, keys[:count])
        if (
            Measurement.get(console, console.options.update(max_width=_UNBOUND), grid).maximum
            <= console.width
        ):
            break
    console.print(grid)
    if len(keys) > count:
        print_plain(f"they differ in {len(keys)} settings; --json has them all")
    return 0


def read_runs(paths: Sequence[Path]) -> list[RunRecords]:
    """The records of all runs there; one that cannot be read is said and left out."""
    runs = []
    for path in find_runs(paths):
        try:
            records = RunRecords(path)
            records.read_on()
        except RunError as error:
            say(str(error))
            continue
        runs.append(records)
    return runs


def settings_of(config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The values of these settings."""
    flat = flattened(config)
    return {key: flat.get(key) for key in keys}


def table(
    summaries: Sequence[RunSummary], settings: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> Table:
    """For a terminal, a row per run, with these settings."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE)
    for name in (
        "run",
        "status",
        "step",
        "pass rate (95 %)",
        "best",
        "reward",
        "hours",
        "device-h",
        "tokens",
    ):
        is_text = name in ("run", "status")
        grid.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for key in keys:
        grid.add_column(key.rpartition(".")[2])
    for summary, run_settings in zip(summaries, settings, strict=True):
        cells = [
            summary.name, summary.status, str(summary.step), _rate(summary),
            _best(summary),
            number_text(summary.reward) if summary.loss is None else f"loss {number_text(summary.loss)}",
            f"{summary.seconds / 3600:.2f}",
            number_text(summary.device_hours), "-" if summary.tokens is None else f"{summary.tokens:,.0f}",
            *(shorten(str(run_settings[key]), _SHOWN_CHARS) for key in keys),
        ]  # fmt: skip
        grid.add_row(*(Text(plain(cell, is_one_line=True)) for cell in cells))
    return grid


def _best(summary: RunSummary) -> str:
    if summary.best_val_reward is not None:
        return f"{summary.best_val_reward:.4g} @{summary.best_step}"
    return (
        "-"
        if summary.best_pass_rate is None
        else f"{100 * summary.best_pass_rate:.1f} % @{summary.best_step}"
    )


def _rate(summary: RunSummary) -> str:
    if summary.pass_rate_final is None:
        return "-" if summary.val_reward is None else f"mean reward {summary.val_reward:.4g}"
    start = "" if summary.pass_rate_start is None else f"{100 * summary.pass_rate_start:.1f} -> "
    return start + rate_text(summary.pass_rate_final, summary.low, summary.high)
