"""`strop quickstart`: a policy that learns, end to end, on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from strop.cli.settings import user_path
from strop.run import RunError
from strop.utils.quiet_libraries import quiet_models
from strop.utils.shell_words import shell_word
from strop.utils.terminal import Interrupted

SUMMARY = "train a tiny model end to end on this machine, in about three minutes"
EPILOG = """\
examples:
  strop quickstart
  strop quickstart --seed 1 --out runs/second
  strop quickstart --json trainer.max_steps=40

The same command on an interrupted folder continues its run; on a finished one, it shows the result.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("--seed", type=int, default=0, help="seed of model, task and sampling (default 0)")
    parser.add_argument(
        "--out", type=user_path, help="folder of the quickstart (default runs/quickstart-seed<N>)"
    )
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as in strop config show")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    folder: Path = args.out or Path("runs") / f"quickstart-seed{args.seed}"
    _claim(folder, args.seed)  # before anything is imported that takes seconds
    quiet_models()
    from strop.cli.quickstart.stages import carry_out

    try:
        carry_out(folder, seed=args.seed, overrides=args.overrides, wants_json=args.json)
    except KeyboardInterrupt as error:
        hint = f"continue with `strop quickstart --seed {args.seed} --out {shell_word(folder)}`"
        raise Interrupted(hint, cause=error) from error.__cause__
    return 0


def _claim(folder: Path, seed: int) -> None:
    """Make the folder, or check that it is a quickstart of this seed."""
    marker = folder / "quickstart.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            if any(folder.iterdir()):
                raise RunError(f"{folder} is not empty and no quickstart; choose another folder with --out")
            marker.write_text(json.dumps({"seed": seed}))
    except OSError as error:
        raise RunError(
            f"cannot write {folder}: {error.strerror}; choose another folder with --out"
        ) from error
    seed_before = json.loads(marker.read_text())["seed"]
    if seed_before != seed:
        raise RunError(
            f"{folder} is the quickstart of seed {seed_before}; give --seed {seed_before}, or another --out"
        )
