"""`--from RUN` and `--with-optimizer`, of commands that make runs."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that start a run from another one."""
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="RUN[@STEP|@best]",
        help="start a new run from the weights of RUN's last checkpoint (or of STEP, or of the best validation), with "
        "the settings of RUN unless --config names others; RUN may be the URL of a copy",
    )
    parser.add_argument(
        "--with-optimizer", action="store_true", help="with --from: take over the optimizer's state too"
    )
