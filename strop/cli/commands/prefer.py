"""`strop prefer`: training on preferences; `strop dpo` and `strop reward-model` are its two best known kinds."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any, get_args

from strop.algorithms.preference_loss_config import Loss
from strop.cli.commands.sft import reads_of
from strop.cli.launching import add_run_arguments, begin, carrying_out
from strop.run import MODEL_FOLDER, RunFolder
from strop.trainer.sft.result import sft_result
from strop.utils.quiet_libraries import quiet_models
from strop.utils.sanitize import as_number
from strop.utils.terminal import print_json, print_plain, say

SUMMARY = "train a policy or a reward model on preferences (DPO, IPO, KTO, ORPO, SimPO, Bradley-Terry)"
READS = reads_of("prefer")
EPILOG = """\
examples:
  strop prefer model.path=models/smollm2 'prefer.data.train_files=[pairs.jsonl]' prefer.loss=ipo
  strop prefer model.path=models/smollm2 'prefer.data.train_files=[rated.jsonl]' prefer.loss=kto
  strop dpo model.path=models/smollm2 'prefer.data.train_files=[pairs.jsonl]' prefer.beta=0.1
  strop reward-model model.path=models/smollm2 'prefer.data.train_files=[pairs.jsonl]' prefer.optim.lr=1e-5

Rows have `prompt`, `chosen` and `rejected`; with prefer.loss=kto, `prompt`, `completion` and `label`. The result is the
folder `model` of the run: a policy, or with prefer.loss=reward a classifier with one score for reward_model.path.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    add_run_arguments(parser, kind="prefer")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    return carry_out(args, losses=get_args(Loss))


def carry_out(args: argparse.Namespace, *, losses: Collection[str]) -> int:
    """Train with one of these losses, or go on.

    Raises:
        ValueError: the settings have another one.
    """
    start = begin(args, kind="prefer", reads=READS)
    with carrying_out(start, kind="prefer"):
        loss = start.config.prefer.loss
        if loss not in losses:
            raise ValueError(
                f"prefer.loss is {loss}, but this command is for {', '.join(losses)}: use `strop prefer`"
            )
        if not start.is_finished:
            quiet_models()
            from strop.trainer.preference.trainer import train_on_preferences

            train_on_preferences(start.config, start.run, checkpoint=start.checkpoint, say=say)
    record = record_of(start.run)
    if args.json:
        print_json(record)
        return 0
    val = "" if record["val_loss"] is None else f", {record['val_loss']:.4f} on validation data"
    print_plain(
        f"{record['steps']} step{'s' * (record['steps'] != 1)}, {record['seconds']:.0f} s; "
        f"loss {record['loss']:.4f}{val}"
    )
    if record["accuracy_start"] is not None:
        print_plain(
            f"held-out comparisons made as the rows do: {100 * record['accuracy_start']:.1f} % at the start, "
            f"{100 * record['accuracy_final']:.1f} % at the end"
        )
    print_plain(f"run folder: {record['run']}\nmodel:      {start.run.path / MODEL_FOLDER}")
    return 0


def record_of(run: RunFolder) -> dict[str, Any]:
    """JSON record that the commands print; the accuracies are None without validation data, and with loss=kto."""
    result = sft_result(run)
    validations = run.events.read("validation")
    first = validations[0] if validations and validations[0]["step"] == 0 else {}
    last = validations[-1] if validations else {}
    return {
        "run": str(result.run),
        "model": str(result.model),
        "steps": result.steps,
        "seconds": round(result.seconds, 2),
        "loss": result.loss,
        "val_loss": result.val_loss,
        "accuracy_start": _accuracy(first),
        "accuracy_final": _accuracy(last),
    }


def _accuracy(validation: dict[str, Any]) -> float | None:
    accuracy = validation.get("accuracy")
    return None if accuracy is None else as_number(accuracy)
