"""`strop sft`: supervised fine-tuning on conversations."""

from __future__ import annotations

import argparse

from strop.cli.launching import add_run_arguments, begin, carrying_out
from strop.cli.unused_keys import Reads
from strop.run import MODEL_FOLDER
from strop.trainer.sft.result import sft_result
from strop.utils.quiet_libraries import quiet_models
from strop.utils.terminal import print_json, print_plain, say

SUMMARY = "fine-tune a model on conversations (SFT)"
EPILOG = """\
examples:
  strop sft --config examples/arithmetic/sft.yaml --out runs/arithmetic-sft
  strop sft model.path=models/smollm2 'sft.data.train_files=[chats.jsonl]' sft.optim.lr=2e-5
  strop sft model.path=models/start 'sft.data.train_files=[runs/grpo]' sft.data.keep.best=2 sft.data.keep.min_score=1
  strop sft model.path=models/student 'sft.data.train_files=[logs.parquet]' sft.distillation.coef=1

Rows have `messages`, or `prompt` and `completion`, or the tokens themselves, as `strop generate --out`,
`strop eval --out` and the samples of a run folder have them. The trained model is the folder `model` of the run,
ready for `strop train model.path=...`.
"""


def reads_of(section: str) -> Reads:
    """Keys that a fine-tuning with this section reads."""
    return Reads(
        keys=(
            "model", section, "run", "resources", "trainer.seed", "trainer.trackers", "trainer.project_name",
            "trainer.experiment_name", "trainer.profile_steps", "trainer.profile_memory",
            "trainer.rehearse_longest_batch", "eval.every", "eval.before_train", "data.cache_dir",
            "algorithm.extensions",
        ),
        but=("run.keep_best", "run.save_samples", "resources.apart", "resources.offload_idle"),
    )  # fmt: skip


READS = reads_of("sft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    add_run_arguments(parser, kind="sft")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    start = begin(args, kind="sft", reads=READS)
    with carrying_out(start, kind="sft"):
        if start.is_finished:
            result = sft_result(start.run)
        else:
            quiet_models()
            from strop.trainer.sft.trainer import fine_tune

            result = fine_tune(start.config, start.run, checkpoint=start.checkpoint, say=say)
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
        print_plain(
            f"{result.steps} step{'s' * (result.steps != 1)}, {result.seconds:.0f} s; loss {result.loss:.4f}{val}"
        )
        print_plain(f"run folder: {result.run}\nmodel:      {result.run / MODEL_FOLDER}")
    return 0
