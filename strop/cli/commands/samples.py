"""`strop samples`: what the model wrote during a run, what it was worth, and what became of it."""

from __future__ import annotations

import argparse

from strop.cli.settings import user_path
from strop.observability.viewer.filtered import find_fates, table_of
from strop.observability.viewer.samples import decoder, find_samples, in_order, matching, panel
from strop.observability.viewer.token_view import legend, response_tokens, token_table
from strop.observability.viewer.turn_view import training_sequences
from strop.run import RunError, RunFolder
from strop.run.naming import run_in
from strop.utils.terminal import UsageError, print_json, say

SUMMARY = "show samples of a run with their rewards"
EPILOG = """\
examples:
  strop samples runs/arithmetic
  strop samples runs/arithmetic --step 40 --limit 20
  strop samples runs/arithmetic --sort worst --cut
  strop samples runs/arithmetic --split val --id val-000007
  strop samples runs/arithmetic --id e0-000012/3 --tokens
  strop samples runs/arithmetic --id e0-000012/3 --json
  strop samples runs/arithmetic --why-dropped

A sample's id is <visit of a row>/<number of the sample>; a visit alone (e0-000012) names all its samples. With a
limit, answers to different prompts come first.
"""

SORTS = ("worst", "best")
DEFAULT_LIMIT = 5
"""Samples shown on a terminal; --json gives all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", type=user_path, help="run folder")
    parser.add_argument("--step", type=int, metavar="N", help="step (default: the last one; with --id, all)")
    parser.add_argument(
        "--id", action="append", default=[], metavar="ID", dest="ids", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--split", choices=("train", "val"), default="train", help="training or validation (default train)"
    )
    parser.add_argument("--source", metavar="NAME", help="only samples of this data source")
    parser.add_argument("--cut", action="store_true", help="only answers that a limit of tokens cut")
    parser.add_argument("--sort", choices=SORTS, help="lowest or highest score first; no score comes last")
    parser.add_argument(
        "--limit", type=int, metavar="N", help=f"show at most N (default {DEFAULT_LIMIT}; all with --json)"
    )
    parser.add_argument(
        "--tokens", action="store_true", help="also a line per token: who wrote it, and how likely it was"
    )
    parser.add_argument(
        "--why-dropped", action="store_true", help="count the fates of all samples, with the reasons"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with all columns")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit is {args.limit}; use at least 1")
    args.run = run_in(args.run)
    if args.why_dropped:
        return _why_dropped(args)
    with RunFolder.open(args.run, read_only=True) as run_folder:
        rows = find_samples(run_folder, step=args.step, ids=args.ids, split=args.split)
    rows = matching(rows, source=args.source, is_cut=args.cut)
    limit = args.limit if args.limit is not None else len(rows) if args.json else DEFAULT_LIMIT
    if args.sort is not None or limit < len(rows):
        rows = in_order(rows, sort=args.sort)
    shown = rows[:limit]
    if args.json:
        print_json({"run": str(args.run), "split": args.split, "num_found": len(rows), "samples": shown})
        return 0
    from rich.console import Console

    console = Console()
    decode = None
    if args.tokens or args.ids:
        try:
            decode = decoder(args.run)
        except (RunError, ValueError) as error:
            if args.tokens:
                raise
            say(f"without token colours: {error}")
    for row in shown:
        console.print(panel(row, decode))
        if args.tokens and decode is not None:
            sequences = training_sequences(row)
            for number, sequence in enumerate(sequences, start=1):
                if len(sequences) > 1:
                    console.print(f"sequence {number} of {len(sequences)}", highlight=False)
                console.print(token_table(response_tokens(sequence, decode)))
    if decode is not None:
        console.print(legend())
    steps = sorted({row["step"] for row in rows})
    label = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    more = "" if len(shown) == len(rows) else f"; --limit {len(rows)} shows all"
    console.print(f"{len(shown)} of {len(rows)} {args.split} samples of {label}{more}", highlight=False)
    return 0


def _why_dropped(args: argparse.Namespace) -> int:
    """Fates of all samples, from the ledger."""
    if args.ids or args.tokens or args.source or args.cut or args.sort:
        raise UsageError(
            "--why-dropped counts all samples of the run; leave out --id, --tokens, --source, --cut and --sort"
        )
    with RunFolder.open(args.run, read_only=True) as run_folder:
        fates = find_fates(run_folder, step=args.step)
    total = sum(fate.count for fate in fates)
    if args.json:
        print_json({"run": str(args.run), "num_issued": total, "fates": [fate.as_json() for fate in fates]})
        return 0
    from rich.console import Console

    console = Console()
    console.print(table_of(fates))
    trained = sum(fate.count for fate in fates if fate.name == "trained")
    scope = "" if args.step is None else f" of step {args.step}"
    console.print(f"{trained} of {total} samples{scope} were trained on", highlight=False)
    return 0
