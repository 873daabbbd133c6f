"""`strop dpo`: a policy from comparisons of answers."""

from __future__ import annotations

import argparse

from strop.cli.commands import prefer

SUMMARY = "train a policy on comparisons of answers: DPO, and IPO, ORPO, SimPO or hinge with prefer.loss"
LOSSES = ("sigmoid", "hinge", "ipo", "orpo", "simpo")
EPILOG = """\
examples:
  python examples/dpo/prepare.py
  strop dpo --config examples/dpo/config.yaml --out runs/dpo
  strop dpo --config examples/dpo/config.yaml --out runs/simpo prefer.loss=simpo prefer.beta=2

It is `strop prefer` for comparisons; answers with a label (KTO) are for that command.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    prefer.add_arguments(parser)
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    return prefer.carry_out(args, losses=LOSSES)
