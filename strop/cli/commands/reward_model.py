"""`strop reward-model`: a model with one score, from comparisons of answers."""

from __future__ import annotations

import argparse

from strop.cli.commands import prefer

SUMMARY = "train a reward model on comparisons of answers (Bradley-Terry)"
EPILOG = """\
examples:
  python examples/dpo/prepare.py
  strop reward-model --config examples/reward_model/config.yaml --out runs/reward-model
  strop reward-model --resume runs/reward-model prefer.num_epochs=6

It is `strop prefer prefer.loss=reward`. A run takes the model with reward_model.path=runs/reward-model/model.
"""
_LOSS = "prefer.loss=reward"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    prefer.add_arguments(parser)
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    if args.resume is None:
        args.overrides = [_LOSS, *args.overrides]
    return prefer.carry_out(args, losses=("reward",))
