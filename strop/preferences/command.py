"""`strop prefer`: training on preferences."""

from __future__ import annotations

import argparse

from strop.cli.launching import add_run_arguments, begin, carrying_out
from strop.cli.libraries import quiet_models
from strop.cli.output import print_json, print_plain, say
from strop.cli.unread import Reads
from strop.run import MODEL_FOLDER
from strop.supervised.result import sft_result_of

SUMMARY = "train a policy or a reward model on preferences (DPO, IPO, KTO, Bradley-Terry)"
READS = Reads(
    keys=(
        "model", "prefer", "run", "resources", "trainer.seed", "trainer.trackers", "eval.every", "eval.before_train",
        "data.cache_dir", "algorithm.extensions",
    ),
    but=("run.keep_best", "run.save_samples", "resources.apart", "resources.offload_idle"),
)  # fmt: skip
EPILOG = """\
examples:
  strop prefer model.path=models/smollm2 'prefer.data.train_files=[pairs.jsonl]' prefer.beta=0.1
  strop prefer model.path=models/smollm2 'prefer.data.train_files=[pairs.jsonl]' prefer.loss=reward prefer.optim.lr=1e-5

Rows have `prompt`, `chosen` and `rejected`; with prefer.loss=kto, `prompt`, `completion` and `label`. The result is the
folder `model` of the run: a policy, or with prefer.loss=reward a classifier with one score for reward_model.path.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    add_run_arguments(parser, kind="prefer")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    start = begin(args, kind="prefer", reads=READS)
    with carrying_out(start, kind="prefer"):
        if start.is_finished:
            result = sft_result_of(start.run)
        else:
            quiet_models()
            from strop.preferences.trainer import train_on_preferences

            result = train_on_preferences(start.config, start.run, checkpoint=start.checkpoint, say=say)
    if args.json:
        print_json(
            {
                "run": str(result.run),
                "model": str(result.model),
                "steps": result.steps,
                "seconds": round(result.seconds, 2),
                "loss": result.loss,
                "val_loss": result.val_loss,
            }
        )
    else:
        val = "" if result.val_loss is None else f", {result.val_loss:.4f} on validation data"
        print_plain(f"{result.steps} steps, {result.seconds:.0f} s; loss {result.loss:.4f}{val}")
        print_plain(f"run folder: {result.run}\nmodel:      {result.run / MODEL_FOLDER}")
    return 0
