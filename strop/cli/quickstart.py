"""`strop quickstart`: a policy that learns, end to end, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from strop.cli.libraries import quiet_models
from strop.cli.output import Interrupted

EPILOG = """\
examples:
  strop quickstart
  strop quickstart --seed 1 --out runs/second
  strop quickstart --json trainer.max_steps=40

Given again on an interrupted folder, it goes on to the same end; on a finished one, it shows the result.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("--seed", type=int, default=0, help="seed of model, task and sampling (default 0)")
    parser.add_argument("--out", type=Path, help="folder of the quickstart (default runs/quickstart-seed<N>)")
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as in strop config show")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    quiet_models()
    from strop.cli.quickstart_stages import carry_out

    folder: Path = args.out or Path("runs") / f"quickstart-seed{args.seed}"
    try:
        carry_out(folder, seed=args.seed, overrides=args.overrides, wants_json=args.json)
    except KeyboardInterrupt as error:
        hint = f"continue with `strop quickstart --seed {args.seed} --out {folder}`"
        raise Interrupted(hint, cause=error) from error.__cause__
    return 0
