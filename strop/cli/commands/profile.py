"""`strop profile`: where the time of a run went, and the largest part that a setting would save."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from strop.cli.settings import user_path
from strop.observability.profile.report import Profile, profile_of
from strop.observability.viewer.records import RunRecords
from strop.utils.terminal import UsageError, plain, print_json, print_plain

if TYPE_CHECKING:
    from rich.table import Table

SUMMARY = "show where the time of a run went, and what would save most of it"
EPILOG = """\
examples:
  strop profile runs/arithmetic
  strop train --config config.yaml --out runs/a 'trainer.profile_steps=[3]'
  strop profile runs/a --json

Every run has phases. Steps that trainer.profile_steps names also have a timeline and traces, for ui.perfetto.dev.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", type=user_path, help="run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    records = RunRecords(args.run)
    records.read_on()
    profile = profile_of(records)
    if args.json:
        print_json(profile.as_json())
        return 0
    if not profile.phases.steps:
        raise UsageError(f"{args.run} has done no step yet, so there is no time to look at")
    from rich.console import Console

    count = len(profile.phases.steps)
    print_plain(f"{args.run}: {count} step{'s' * (count > 1)}, {profile.phases.total:.1f} s")
    console = Console()
    console.print(phase_table(profile))
    print_plain(avoidable_lines(profile))
    for step in profile.profiled:
        print_plain(
            f"\nstep {step.step}, profiled: {step.seconds:.2f} s, clocks within {1e3 * step.clock_error_s:.1f} ms"
        )
        console.print(rank_table(profile, step.step))
        print_plain(f"open {step.file} in ui.perfetto.dev; traces of torch are beside it")
    for sentence in profile.unreadable:
        print_plain(f"\n{sentence}")
    return 0


def phase_table(profile: Profile) -> Table:
    """Seconds and share of each phase."""
    from rich.table import Table

    table = Table("phase", box=None)
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in profile.phases.seconds.items():
        table.add_row(
            plain(name, is_one_line=True), f"{seconds:.2f}", f"{100 * profile.share(seconds):.1f} %"
        )
    return table


def avoidable_lines(profile: Profile) -> str:
    """The largest avoidable part, with its remedy."""
    part = profile.avoidable
    if part is None:
        return "largest avoidable part: none was found"
    return (
        f"largest avoidable part: {part.name}, {part.seconds:.2f} s ({100 * profile.share(part.seconds):.1f} %)\n"
        f"  {part.setting}\n  {part.reason}"
    )


def rank_table(profile: Profile, step: int) -> Table:
    """Work and longest waits of every rank of a profiled step."""
    from rich.table import Table

    table = Table("role", "rank", box=None)
    table.add_column("busy s", justify="right")
    table.add_column("waits s", justify="right")
    table.add_column("most of them")
    (profiled,) = (each for each in profile.profiled if each.step == step)
    for rank in profiled.ranks:
        longest = next((f"{name}: {seconds:.2f}" for name, seconds in rank.waits_s.items()), "")
        cells = (
            rank.role,
            str(rank.rank),
            f"{rank.busy_s:.2f}",
            f"{sum(rank.waits_s.values()):.2f}",
            longest,
        )
        table.add_row(*(plain(cell, is_one_line=True) for cell in cells))
    return table
