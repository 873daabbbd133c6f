"""`strop replay`: a recorded run once more, on the same or other resources, and whether it came out the same."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.launching import carrying_out
from strop.cli.settings import add_trust_argument, admission, aliases_of, user_path
from strop.run import RunFolder
from strop.run.fingerprints import FingerprintChain
from strop.run.first_difference import Difference, common_steps, compare
from strop.run.folder import CONFIG_FILE
from strop.run.naming import run_in
from strop.utils.quiet_libraries import quiet_models
from strop.utils.shell_words import shell_word
from strop.utils.terminal import UsageError, print_json, print_plain, say

if TYPE_CHECKING:
    from strop.trainer.replayed_run import RecordedRun
    from strop.trainer.start import Start

SUMMARY = "repeat a recorded run, also on other resources, and verify that its results are the same"
EPILOG = """\
examples:
  strop replay runs/cluster --out runs/again
  strop replay runs/cluster --out runs/again resources.runtime=inline resources.apart='{}' resources.ranks=1

The run is made again with its own settings, to the step that it came to. Of a run whose generation was ahead of
training (rollout.max_staleness) the recorded schedule is followed: groups end in the recorded order, and each token is
sampled by the version that sampled it. Settings of where it runs, how work is cut, and what is saved may be given anew.

Exit code 0: equal to the bit. 1: it came out otherwise; `strop diff` shows where.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("run_a", metavar="RUN", type=user_path, help="run folder")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings that may be given anew")
    parser.add_argument(
        "--out", metavar="DIR", type=user_path, required=True, help="run folder, absent or empty"
    )
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")
    add_trust_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    start, recorded = _begin(args)
    with carrying_out(start, kind="train"):
        quiet_models()
        from strop.trainer.train import train

        train(start.config, start.run, say=say, force=True)
    with (
        RunFolder.open(recorded.run, read_only=True) as old,
        RunFolder.open(start.run.path, read_only=True) as new,
    ):
        old_prints, new_prints = FingerprintChain(old.events).read(), FingerprintChain(new.events).read()
    difference, steps = compare(old_prints, new_prints), common_steps(old_prints, new_prints)
    if args.json:
        print_json(_record(recorded, start.run.path, difference, len(steps)))
    elif difference is None:
        print_plain(f"equal to {recorded.run} over {len(steps)} steps ({steps[0]} to {steps[-1]})")
    else:
        print_plain(
            f"step {difference.step} differs first in {difference.stage}, {difference.num_equal_steps} before it are "
            f"equal; look closer with `strop diff {shell_word(recorded.run)} {shell_word(start.run.path)}`"
        )
    return 0 if difference is None else 1


def _begin(args: argparse.Namespace) -> tuple[Start, RecordedRun]:
    from strop.trainer.replay_folder import replay_run

    folder = run_in(args.run_a)
    with RunFolder.open(folder, read_only=True) as old:
        made_by = old.made_by
    if made_by not in ("", "train", "replay"):
        raise UsageError(
            f"{folder} is a run of `strop {made_by}`; `strop replay` repeats runs of `strop train`"
        )
    admit = None if args.trust_code else admission(folder / CONFIG_FILE, args.overrides)
    return replay_run(
        folder,
        args.out,
        overrides=args.overrides,
        command=args.command_line,
        say=say,
        admit=admit,
        aliases=aliases_of(args),
    )


def _record(
    recorded: RecordedRun, out: Path, difference: Difference | None, num_steps: int
) -> dict[str, object]:
    return {
        "run": recorded.run,
        "replay": str(out),
        "equal": difference is None,
        "num_common_steps": num_steps,
        "num_equal_steps": num_steps if difference is None else difference.num_equal_steps,
        "step": None if difference is None else difference.step,
        "stage": None if difference is None else difference.stage,
    }
