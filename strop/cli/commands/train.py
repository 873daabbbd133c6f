"""`strop train`: reinforcement learning from rewards."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from strop.cli.launching import add_run_arguments, begin, carrying_out
from strop.run import MODEL_FOLDER
from strop.utils.quiet_libraries import quiet_models
from strop.utils.shell_words import shell_word
from strop.utils.terminal import print_json, print_plain, say

if TYPE_CHECKING:
    from strop.trainer.early_stopping import TrainResult

EPILOG = """\
examples:
  strop train --config examples/arithmetic/config.yaml --out runs/arithmetic
  strop train model.path=models/smollm2 'data.train_files=[train.parquet]' reward.path=reward.py
  strop train --resume runs/arithmetic

Before the first step the preflight plays a few dozen samples, shows ten of them with their scores, and refuses to start
a run that could not learn (docs/preflight.md).

An interrupted run continues from its last checkpoint to the same end. `strop config show --docs` lists all
settings.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    add_run_arguments(parser, kind="train")
    parser.add_argument(
        "--force",
        action="store_true",
        help="start the run even where the preflight finds that it could not learn",
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from strop.trainer.early_stopping import train_result

    start = begin(args, kind="train")
    with carrying_out(start, kind="train"):
        if start.is_finished:
            result = train_result(start.run)
        else:
            quiet_models()
            from strop.trainer.train import train

            result = train(start.config, start.run, checkpoint=start.checkpoint, say=say, force=args.force)
    if args.json:
        has_rate = result.pass_rate_final is not None or result.reward_final is None
        rewards = {"reward_start": result.reward_start, "reward_final": result.reward_final}
        print_json(
            {
                "run": str(result.run),
                "steps": result.steps,
                "seconds": round(result.seconds, 2),
                "pass_rate_start": result.pass_rate_start,
                "pass_rate_final": result.pass_rate_final,
                "best_step": None if result.best is None else result.best[0],
                **({} if has_rate else rewards),
            }
        )
    else:
        _show(result)
    return 0


def _show(result: TrainResult) -> None:
    run = shell_word(result.run)
    from strop.observability.reward_curve import curve_of_run

    print_plain(curve_of_run(result.run), end="")
    print_plain(
        f"{result.steps} step{'s' * (result.steps != 1)}, {result.seconds:.0f} s; validation: {_rates(result)}"
    )
    print_plain(f"run folder: {result.run}\nmodel:      {result.run / MODEL_FOLDER}")
    if result.best is not None and result.best[0] != result.steps:
        step, score = result.best
        reached = (
            f"mean reward {score:.4g}" if result.pass_rate_final is None else f"pass rate {100 * score:.1f} %"
        )
        print_plain(
            f"best:       step {step}, {reached} (checkpoints/global_step_{step}): strop eval "
            f"{run} --step best"
        )
    print_plain(f"next: strop samples {run}   strop generate {run}   strop eval {run}")


def _rates(result: TrainResult) -> str:
    if result.pass_rate_final is None and result.reward_final is None:
        return "none, because data.val_files is empty"
    if result.pass_rate_final is None:
        start = "" if result.reward_start is None else f", {result.reward_start:.4g} at the start"
        return (
            f"mean reward {result.reward_final:.4g}{start} (no pass rate: nothing says which answers pass; give `acc`, "
            f"or set reward.pass_by)"
        )
    final = f"pass rate {100 * result.pass_rate_final:.1f} %"
    if result.interval_final is not None:
        low, high = result.interval_final
        final += f" (95 % interval {100 * low:.1f} to {100 * high:.1f})"
    if result.pass_rate_start is None:
        return final
    return f"{final}, {100 * result.pass_rate_start:.1f} % at the start"
