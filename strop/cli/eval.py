"""`strop eval`: the pass rate of a model on a dataset, and how sure it is."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.libraries import quiet_models
from strop.cli.models import HELP, add_step_argument, find_model, with_model
from strop.cli.output import check_writable, plain, print_json, print_plain, say, write_json_lines
from strop.cli.settings import add_config_arguments, add_trust_argument, load_settings
from strop.cli.unread import refuse_unread

if TYPE_CHECKING:
    from strop.trainer.evaluate import Evaluation, Progress
    from strop.trainer.validation import Validation

EPILOG = """\
examples:
  strop eval runs/arithmetic
  strop eval runs/arithmetic --step best --out answers.jsonl
  strop eval models/smollm2 --config examples/arithmetic/config.yaml data.max_val_prompts=100
  strop eval runs/arithmetic 'data.val_files=[other.parquet]' eval.temperature=1.0 eval.samples_per_prompt=8

An answer passes when its `acc` (else its score) is above 0.5. The interval is
Wilson's, at 95 %, with the answers to one prompt as a cluster.
"""
NEEDS = ("model", "data.val_files", "data.dataset_class", "agent", "reward")
"""Settings whose code an evaluation runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("model", metavar="MODEL_OR_RUN", help=HELP)
    add_config_arguments(parser, source="the settings of the run")
    add_trust_argument(parser)
    add_step_argument(parser)
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write every answer with its score there as JSON lines"
    )
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    source = find_model(args.model, step=args.step)
    for line in source.lines:
        say(line)
    config = load_settings(args, source=source.config, needs=NEEDS)
    refuse_unread(args, "eval")
    config = with_model(config, source, args)
    quiet_models()
    from strop.trainer.evaluate import evaluate

    if args.out is not None:
        check_writable(args.out)
    with progress_bar("eval") as show:
        evaluation = evaluate(config, say=say, on_progress=show)
    if args.out is not None:
        write_json_lines(args.out, evaluation.answers)
        say(f"{len(evaluation.answers)} answers written to {args.out}")
    if args.json:
        print_json({"model": str(source.folder), **_record(evaluation)})
    else:
        _show(evaluation)
    return 0


LINE_EVERY_S = 10.0
"""Seconds between two lines of progress."""


def _lines(label: str) -> Progress:
    said_at = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= LINE_EVERY_S:
            said_at = time.monotonic()
            say(f"{label}: {done} of {total} answers")

    return show


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A bar on standard error while it lasts; where that is no terminal, a line now and then."""
    if not sys.stderr.isatty():
        yield _lines(label)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(evaluation: Evaluation) -> None:
    sources = evaluation.by_source
    shown = {plain(name, is_one_line=True): validation for name, validation in sources.items()}
    lines = shown if len(shown) == 1 else {**shown, "all": evaluation.total}
    width = max(map(len, lines))
    for name, validation in lines.items():
        print_plain(f"{name:<{width}}  {validation.describe()}")


def _record(evaluation: Evaluation) -> dict[str, object]:
    return {
        **_numbers(evaluation.total),
        "seconds": round(evaluation.seconds, 2),
        "sources": {name: _numbers(validation) for name, validation in evaluation.by_source.items()},
        "metrics": evaluation.total.metrics,
    }


def _numbers(validation: Validation) -> dict[str, object]:
    low, high = validation.interval()
    return {
        "pass_rate": validation.pass_rate,
        "low": low,
        "high": high,
        "num_answers": validation.num_answers,
        "num_passed": validation.num_passed,
        "num_unscored": validation.num_unscored,
    }
