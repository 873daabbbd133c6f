"""`--from RUN` and `--with-optimizer`, of commands that make runs."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that start a run from another one."""
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="RUN[@STEP|@best]",
        help="begin a run with the weights of this one's last checkpoint (of STEP, of the best validation), and with "
        "its settings where --config names no others; RUN may be the URL of a copy",
    )
    parser.add_argument(
        "--with-optimizer", action="store_true", help="with --from: take over the optimizer's state too"
    )
