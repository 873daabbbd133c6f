"""`strop score`: a reward over saved answers, without any model: what would change, and what goes wrong."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strop.cli.settings import add_config_arguments, add_trust_argument, load_settings, user_path
from strop.cli.unused_keys import AFTER_SCORING, Reads, refuse_unread
from strop.utils.terminal import UsageError, number_text, plain, print_json, print_plain, say, shorten

if TYPE_CHECKING:
    from strop.rewards.rescoring import Rescored, SavedSample
    from strop.trainer.config import Config

SUMMARY = "score saved answers with a reward, without a model, and compare with the recorded scores"
EPILOG = """\
examples:
  strop score reward.py runs/arithmetic
  strop score reward.py:strict runs/arithmetic --step 40 --show 20
  strop score config.yaml answers.jsonl reward.timeout_s=30
  strop score builtin answers.parquet data.default_data_source=openai/gsm8k --json
  strop score same runs/arithmetic --split val --check

REWARD is a Python file with the function (FILE or FILE:NAME), a YAML file whose section `reward` is used, `builtin`
for the scorer of each data source, or `same` for the reward of the run. With a run folder, all other settings are those
of the run. A file of samples has one answer per row: see docs/rewards.md.
"""
READS = Reads(
    keys=(
        "reward", "model", "data.train_files", "data.val_files", "data.dataset_class", "data.cache_dir",
        "data.prompt_key", "data.data_source_key", "data.ground_truth_key", "data.default_data_source",
        "algorithm.extensions", "resources.env",
    ),
    but=AFTER_SCORING,
)  # fmt: skip
DEFAULT_SHOW = 10
NEEDS = ("reward", "data.train_files", "data.val_files")
"""Settings whose code scoring runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("reward", metavar="REWARD", help="FILE.py, FILE.py:NAME, FILE.yaml, builtin or same")
    parser.add_argument(
        "samples", metavar="SAMPLES", type=user_path, help="run folder, or a .jsonl or .parquet file"
    )
    parser.add_argument(
        "--step", type=int, action="append", metavar="N", help="of a run; may be repeated (default: all)"
    )
    parser.add_argument(
        "--split", choices=("train", "val"), help="of a run: training or validation (default train)"
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="score only N samples, at even distances (all of some prompts where a judge compares)",
    )
    parser.add_argument(
        "--show",
        type=int,
        default=DEFAULT_SHOW,
        metavar="N",
        help=f"differences shown (default {DEFAULT_SHOW})",
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 when a score differs or is missing")
    add_config_arguments(parser, source="the settings of the run")
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object with every difference")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    for name in ("limit", "show"):
        value = getattr(args, name)
        if value is not None and value < (1 if name == "limit" else 0):
            raise UsageError(f"--{name} is {value}; use at least {1 if name == 'limit' else 0}")
    config = _settings(args)
    samples = _samples(args, config)
    from strop.rewards.rescoring import rescore
    from strop.trainer.model_locations import POLICY, locate

    if config.reward.manager:  # it is given the tokenizer
        config = locate(config, say=say, weights=False, keys=POLICY).config
    say(f"scoring {len(samples)} samples")
    rescored = rescore(samples, config.reward, tokenizer=config.model.tokenizer_folder)
    if args.json:
        print_json({"reward": args.reward, "samples": str(args.samples), **_record(rescored)})
    else:
        _show(rescored, args.show, timeout_s=config.reward.timeout_s)
    failed = any(result.has_changed or result.outcome.score is None for result in rescored)
    return 1 if args.check and failed else 0


def reward_settings(reward: str) -> list[str]:
    """The overrides that make FILE.py, FILE.py:NAME or `builtin` all that scores.

    Raises:
        UsageError: it is none of them.
    """
    path, _, name = ("", "", "") if reward == "builtin" else reward.partition(":")
    if path and not path.endswith(".py"):
        raise UsageError(f"REWARD is {reward!r}; give FILE.py, FILE.py:NAME, FILE.yaml, builtin or same")
    chosen = [
        f"reward.path='{path}'",
        f"reward.name={name or 'compute_score'}",
        "reward.functions=[]",
        "reward.manager=''",
    ]
    return [*chosen, *(f"reward.{name}={{}}" for name in ("judge", "server"))]


def _settings(args: argparse.Namespace) -> Config:
    """The configuration with the reward that was asked for."""
    is_run = args.samples.is_dir()
    reward = str(args.reward)
    if not is_run:
        if args.step or args.split:
            raise UsageError("--step and --split choose samples of a run; a file is scored as a whole")
        if reward == "same":
            raise UsageError("`same` is the reward of a run, and SAMPLES is no run folder: name the reward")
    if reward.endswith((".yaml", ".yml")):
        if args.config:
            raise UsageError(f"REWARD is the configuration {reward}; leave --config out")
        args.config = reward
    elif reward != "same":
        args.overrides = [*reward_settings(reward), *args.overrides]
    source = args.samples / "config.yaml" if is_run and (args.samples / "config.yaml").is_file() else None
    config = load_settings(args, source=source, needs=NEEDS)
    refuse_unread(args, "score", READS)
    if not is_run:
        return config
    from strop.trainer.model_commits import as_recorded

    return as_recorded(config, args.samples)


def _samples(args: argparse.Namespace, config: Config) -> list[SavedSample]:
    from strop.rewards.rescoring import samples_of_file, samples_of_run, some_of
    from strop.run import RunError, RunFolder

    if args.samples.is_dir():
        split = args.split or "train"
        with RunFolder.open(args.samples, read_only=True) as run_folder:
            steps = args.step or run_folder.samples.steps(split=split)
            if not steps:
                raise RunError(
                    f"{args.samples} has no {split} samples; a step writes them at its end, unless run.save_samples is "
                    f"false"
                )
            samples = samples_of_run(
                run_folder, config.data, split="val" if split == "val" else "train", steps=steps
            )
    else:
        samples = samples_of_file(args.samples, config.data)
    return samples if args.limit is None else some_of(samples, args.limit, config.reward)


def _record(rescored: Sequence[Rescored]) -> dict[str, Any]:
    usage: dict[str, float] = {}
    for result in rescored:
        for name, value in result.outcome.usage.items():
            usage[name] = usage.get(name, 0.0) + value
    return {
        "num_samples": len(rescored),
        "num_changed": sum(result.has_changed for result in rescored),
        "sources": {source: _numbers(of_source) for source, of_source in _by_source(rescored).items()},
        "usage": usage,
        "differences": [
            _difference(result) for result in rescored if result.has_changed or result.outcome.score is None
        ],
    }


def _by_source(rescored: Sequence[Rescored]) -> dict[str, list[Rescored]]:
    sources: dict[str, list[Rescored]] = {}
    for result in rescored:
        sources.setdefault(result.sample.prompt.data_source, []).append(result)
    return sources


def _numbers(rescored: Sequence[Rescored]) -> dict[str, Any]:
    """Counts, means over the samples that have the number, and seconds of the function."""
    kinds = Counter(result.outcome.kind for result in rescored)
    seconds = [result.outcome.seconds for result in rescored]
    parts: dict[str, list[float]] = {}
    for result in rescored:
        for name, value in result.outcome.parts.items():
            if not isinstance(value, str) and math.isfinite(value):
                parts.setdefault(name, []).append(float(value))
    return {
        "num_samples": len(rescored),
        "old_mean": _mean([result.sample.score for result in rescored if result.sample.score is not None]),
        "new_mean": _mean([result.outcome.score for result in rescored if result.outcome.score is not None]),
        "num_changed": sum(result.has_changed for result in rescored),
        **{kind: kinds[kind] for kind in ("error", "timeout", "infrastructure")},
        "parts": {name: _mean(values) for name, values in sorted(parts.items())},
        "seconds_mean": _mean(seconds),
        "seconds_max": max(seconds),
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _difference(result: Rescored) -> dict[str, Any]:
    return {
        "id": result.sample.id, "step": result.sample.step, "data_source": result.sample.prompt.data_source,
        "old": result.sample.score, "new": result.outcome.score, "outcome": result.outcome.kind,
        "error": result.outcome.error, "parts": dict(result.outcome.parts), "response": result.sample.response,
        "ground_truth": result.sample.prompt.ground_truth,
    }  # fmt: skip


def _show(rescored: Sequence[Rescored], show: int, *, timeout_s: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from strop.rewards import summarize

    console = Console()
    table = Table(box=box.SIMPLE)
    sources = _by_source(rescored)
    table.add_column("source", overflow="fold", min_width=min(20, max(map(len, sources))))
    for name in ("samples", "old mean", "new mean", "changed", "failed", "max s"):
        table.add_column(name, justify="right", no_wrap=True)
    for source, of_source in sources.items():
        numbers = _numbers(of_source)
        failed = sum(numbers[kind] for kind in ("error", "timeout", "infrastructure"))
        table.add_row(
            Text(plain(source, is_one_line=True)), str(numbers["num_samples"]), number_text(numbers["old_mean"]),
            number_text(numbers["new_mean"]), str(numbers["num_changed"]), str(failed), f"{numbers['seconds_max']:.3f}",
        )  # fmt: skip
    console.print(table)
    changed = [result for result in rescored if result.has_changed or result.outcome.score is None]
    if changed and show:
        differences = Table(box=box.SIMPLE)
        for name in ("id", "old", "new", "expected", "answer, or why it has no score"):
            differences.add_column(name, overflow="fold")
        for result in changed[:show]:
            text = result.outcome.error or result.sample.response
            differences.add_row(
                Text(plain(result.sample.id, is_one_line=True)),
                number_text(result.sample.score), number_text(result.outcome.score),
                Text(shorten(str(result.sample.prompt.ground_truth), 30)), Text(shorten(text, 200)),
            )  # fmt: skip
        console.print(differences)
    print_plain(plain(summarize([result.outcome for result in rescored], timeout_s=timeout_s)))
    num_changed = sum(result.has_changed for result in rescored)
    more = f"; --show {len(changed)} shows all" if len(changed) > show else ""
    print_plain(f"{num_changed} of {len(rescored)} scores changed{more}")
