"""`strop eval`: the pass rate of a model on a dataset, and how sure it is."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.model_argument import add_step_argument, data_as_recorded, named_model, with_model
from strop.cli.settings import (
    add_accept_argument,
    add_config_arguments,
    add_trust_argument,
    check_unchanged,
    is_setting,
    load_settings,
    user_path,
)
from strop.cli.unused_keys import (
    AFTER_SCORING,
    GENERATION,
    ORDER,
    SEVERAL,
    WHICH_MODEL,
    Reads,
    reads_which_model,
    refuse_unread,
)
from strop.evaluation.answer_files import write_json_lines
from strop.evaluation.checkpoints import WORDS, has_step, points_of
from strop.evaluation.models import HELP, ModelSource, model_name
from strop.evaluation.sets import add_data_argument, data_of
from strop.utils.quiet_libraries import quiet_models
from strop.utils.terminal import UsageError, check_writable, plain, print_json, print_plain, say

if TYPE_CHECKING:
    from strop.evaluation.evaluate import Evaluation, Progress
    from strop.evaluation.pass_at_k import Rate
    from strop.trainer.config import Config
    from strop.trainer.validation import Validation

SUMMARY = "measure the pass rate of a model, a checkpoint or a run, with its confidence interval"
EPILOG = """\
examples:
  strop eval runs/arithmetic
  strop eval runs/arithmetic --step best --out answers.jsonl
  strop eval runs/arithmetic@all --plot pass_rates.png
  strop eval models/smollm2 --data gsm8k data.max_response_tokens=512
  strop eval models/smollm2 --data math500=downloads/math500.jsonl --data aime24=downloads/aime24.parquet
  strop eval models/smollm2 runs/first@40 runs/second@best --config config.yaml eval.samples_per_prompt=8
  strop eval models/smollm2 --config examples/arithmetic/config.yaml data.max_val_prompts=100
  strop eval --config grpo.yaml
  strop eval runs/arithmetic rollout.engine=vllm
  strop eval --config config.yaml rollout.engine=openai rollout.openai.base_url=https://api.openai.com/v1 \\
      rollout.openai.model=MODEL rollout.openai.api_key_env=OPENAI_API_KEY
  strop eval runs/arithmetic 'data.val_files=[other.parquet]' eval.temperature=1.0 eval.samples_per_prompt=8
  strop eval runs/arithmetic resources.runtime=ray resources.ranks=4

Without MODEL_OR_RUN, the model is model.path of --config: the validation of a training, alone.

An answer passes when its `acc` is above 0.5: what the scorer gives, the function that reward.pass_by names, or a single
reward of 0 or 1. Where there is none of these there is no pass rate, only a mean reward. The interval is
Wilson's, at 95 %, with the answers to one prompt as a cluster. With several answers per prompt, pass@k is the chance
that one of k passes, and maj@k that the most frequent of k extracted answers does, both without bias.

--data NAME is a well-known set with its own prompts and scorer, from the hub, or with NAME=COPY from a copy of its raw
rows as they are published.

Several models give one table: each beside the first one on the same prompts, with the interval of the difference, and
for checkpoints of runs what each point gained had cost. RUN@all is a run's start and every checkpoint.

On several ranks each process has the whole model and a share of the prompts; the answers are those of one process.
"""
READS = Reads(
    keys=(
        *GENERATION, *SEVERAL, "data", "agent", "reward", "trainer.seed", "eval.samples_per_prompt",
    ),
    but=(
        *WHICH_MODEL, "data.train_files", "data.streaming", "data.max_train_prompts", *ORDER, *AFTER_SCORING,
    ),
    instead={
        "rollout.temperature": "eval.temperature", "rollout.samples_per_prompt": "eval.samples_per_prompt",
        "rollout.top_p": "eval.top_p", "rollout.top_k": "eval.top_k", "data.train_files": "data.val_files",
        "data.max_train_prompts": "data.max_val_prompts", "model.path": "MODEL_OR_RUN",
        "resources.apart": "resources.ranks",
        "model.revision": "MODEL_OR_RUN to ORG/NAME@REVISION", "model.local_files_only": "HF_HUB_OFFLINE=1",
    },
)  # fmt: skip
NEEDS = ("model", "rollout", "data.val_files", "data.dataset_class", "agent", "reward")
"""Settings whose code an evaluation runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("model", nargs="?", metavar="MODEL_OR_RUN", help=f"{HELP}; {WORDS}. May be repeated")
    add_config_arguments(parser, source="the settings of the run")
    add_data_argument(parser)
    add_trust_argument(parser)
    add_accept_argument(parser)
    add_step_argument(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=user_path,
        help="write every answer with its score and its tokens there as JSON lines",
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=user_path, help="draw the pass rates of several models there"
    )
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    with data_of(args):
        return _run(args)


def _settings(args: argparse.Namespace, source: ModelSource | None) -> Config:
    reads = reads_which_model(READS) if source is None else READS
    return settings_of(args, None if source is None else source.config, command="eval", reads=reads)


def _run(args: argparse.Namespace) -> int:
    more = [word for word in args.overrides if not is_setting(word)]
    if args.model is not None and not is_setting(args.model) and (more or has_step(args.model)):
        args.overrides = [word for word in args.overrides if is_setting(word)]
        return _run_several(args, [args.model, *more])
    if args.plot is not None:
        raise UsageError(f"--plot {args.plot} draws several models: name them, or RUN@all")
    source = named_model(args)
    config = _settings(args, source)
    from strop.trainer.named_files import check_named_files

    check_named_files(config, "eval")
    config = with_model(config, source, args)
    quiet_models()
    from strop.evaluation.evaluate import evaluate

    if args.out is not None:
        check_writable(args.out)
    with progress_bar("eval") as show:
        evaluation = evaluate(config, say=say, on_progress=show)
    if args.out is not None:
        write_json_lines(args.out, evaluation.answers)
        say(f"{len(evaluation.answers)} answers written to {args.out}")
    if args.json:
        print_json({"model": model_name(config), **_record(evaluation)})
    else:
        _show(evaluation)
        if evaluation.usage:
            say(_asked(config, evaluation.usage))
    return 0


def _run_several(args: argparse.Namespace, words: Sequence[str]) -> int:
    """The same prompts for every model that these words stand for."""
    if args.step is not None or args.out is not None:
        raise UsageError(
            "--step and --out are for one model: with several, name steps as RUN@STEP, and give each an --out alone"
        )
    if args.plot is not None:
        check_writable(args.plot)
    points = [point for word in words for point in points_of(word)]
    source = next((point.source for point in points if point.source.config is not None), None)
    settings = _settings(args, source)
    from strop.trainer.named_files import check_named_files

    check_named_files(settings, "eval")
    quiet_models()
    from strop.cli.eval_table import draw, measured, record_of, show
    from strop.evaluation.evaluate import evaluate

    results = []
    for point in points:
        with progress_bar(point.name) as on_progress:
            config = with_model(settings, point.source, args)
            results.append((point, evaluate(config, say=say, on_progress=on_progress)))
    models = measured(results)
    if args.plot is not None:
        draw(args.plot, models)
    if args.json:
        print_json({"models": [record_of(model, _record(model.evaluation)) for model in models]})
    else:
        show(models)
    return 0


READ_TO_EVALUATE = ("model.", "data.val_files", "reward", "agent.", "algorithm.extensions")
"""Beginnings of the keys of what an evaluation reads from outside a run."""


def settings_of(args: argparse.Namespace, run: Path | None, *, command: str, reads: Reads) -> Config:
    """The settings of a command that evaluates, in one process unless it says otherwise: the ranks of a run are those
    of its training, perhaps of a cluster.

    Args:
        args: with `config`, `overrides` and `trust_code`.
        run: config.yaml of a run, used when there is no --config.
        command: its name, and what it reads.
        reads: as said above.
    """
    config = load_settings(args, source=run, needs=NEEDS)
    refuse_unread(args, command, reads)
    if run is not None and not args.config:
        check_unchanged(args, run.parent, config, only=READ_TO_EVALUATE)
    config = data_as_recorded(args, config, run)
    if not args.config and not any(word.startswith("resources.") for word in args.overrides):
        alone = dataclasses.replace(
            config.resources, runtime="inline", ranks=1, nodes=1, apart={}, weight_store=""
        )
        config = dataclasses.replace(config, resources=alone)
    return config


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
    from strop.evaluation.pass_at_k import maj_at, pass_at

    sources = evaluation.by_source
    shown = {plain(name, is_one_line=True): validation for name, validation in sources.items()}
    lines = shown if len(shown) == 1 else {**shown, "all": evaluation.total}
    width = max(map(len, lines))
    for name, validation in lines.items():
        print_plain(f"{name:<{width}}  {validation.describe()}")
    for label, rates in (("pass", pass_at(evaluation.total)), ("maj", maj_at(evaluation.total))):
        for k, rate in rates.items():
            print_plain(f"{label}@{k} {percent(rate)}")


def percent(rate: Rate) -> str:
    """`91.0 % (95 % interval 86.2 to 94.2)`."""
    return f"{100 * rate.rate:.1f} % (95 % interval {100 * rate.low:.1f} to {100 * rate.high:.1f})"


def _record(evaluation: Evaluation) -> dict[str, object]:
    return {
        **_numbers(evaluation.total),
        "seconds": round(evaluation.seconds, 2),
        "sources": {name: _numbers(validation) for name, validation in evaluation.by_source.items()},
        "metrics": evaluation.total.metrics,
        **({"usage": dict(evaluation.usage)} if evaluation.usage else {}),
    }


def _asked(config: Config, usage: Mapping[str, int]) -> str:
    remote = config.rollout.remote
    address = remote.base_url if remote else ""
    return (
        f"{model_name(config)} at {address}: {usage['requests']} requests, {usage['retries']} "
        f"of them repeats; {usage['input_tokens']} tokens in, {usage['output_tokens']} out, as it counts them"
    )


def _numbers(validation: Validation) -> dict[str, object]:
    from strop.evaluation.pass_at_k import maj_at, pass_at

    is_rate = validation.pass_rate is not None
    low, high = (validation.interval() if is_rate else validation.reward_interval()) or (None, None)
    return {
        "pass_rate": validation.pass_rate,
        "mean_reward": validation.mean_reward,
        "low": low,
        "high": high,
        "num_answers": validation.num_answers,
        "num_passed": validation.num_passed,
        "num_unscored": validation.num_unscored,
        "pass_at": {str(k): dataclasses.asdict(rate) for k, rate in pass_at(validation).items()},
        "maj_at": {str(k): dataclasses.asdict(rate) for k, rate in maj_at(validation).items()},
    }
