"""`strop compare`: whether a model is better than another on the same prompts."""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.commands.eval import READS, progress_bar, settings_of
from strop.cli.model_argument import with_model
from strop.cli.settings import add_accept_argument, add_trust_argument, is_setting
from strop.evaluation.checkpoints import WORDS, has_step, points_of
from strop.evaluation.models import HELP
from strop.evaluation.sets import add_data_argument, data_of
from strop.utils.quiet_libraries import quiet_models
from strop.utils.safe_read import lines_of, open_regular, parse_json
from strop.utils.sanitize import finite
from strop.utils.terminal import UsageError, plain, print_json, print_plain, say

if TYPE_CHECKING:
    from strop.evaluation.models import ModelSource
    from strop.evaluation.paired_test import PairedComparison

SUMMARY = "compare models on the same prompts: difference, confidence interval and p-value"
EPILOG = """\
examples:
  strop compare runs/first runs/second --data test.parquet
  strop compare runs/first@20 runs/first@best
  strop compare models/smollm2 runs/first --config config.yaml eval.temperature=1.0 eval.samples_per_prompt=8
  strop eval models/smollm2 --config config.yaml --out before.jsonl
  strop compare before.jsonl runs/first --config config.yaml

Every model answers the same prompts with the same settings: those of --config, else of the first run named; a .jsonl
file holds answers of `strop eval --out`. The difference is the later model's pass rate less the first one's (of mean
rewards, where nothing says which answers pass), with a 95 % interval of a bootstrap over prompts; p is the chance of
one as large if neither were better. With several models each is compared with the first.
"""
ANSWERS = ".jsonl"
SURE = 0.05
"""A difference is one where p is below it and the interval lies on one side of 0: with few prompts that differ, the
interval alone is too narrow."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Scores and pass flags of one model for each prompt."""

    name: str
    passed: Mapping[str, Sequence[bool | None]]
    """Pass flag of each answer, by prompt; None where nothing decides it."""
    scores: Mapping[str, Sequence[float]]
    """Scores of the answers that could be scored, by prompt."""
    texts: Mapping[str, str]
    """The prompts themselves."""

    @property
    def has_rate(self) -> bool:
        """True if every answer has a pass flag."""
        return all(is_passed is not None for some in self.passed.values() for is_passed in some)

    def rate(self, prompt: str) -> float:
        """Share of the answers to a prompt that passed."""
        return sum(map(bool, self.passed[prompt])) / len(self.passed[prompt])

    def mean_reward(self, prompt: str) -> float | None:
        """Mean reward of the answers to a prompt; None where none could be scored."""
        scores = self.scores.get(prompt, ())
        return sum(scores) / len(scores) if scores else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL_OR_RUN",
        help=f"two or more: {HELP}; {WORDS}; or a {ANSWERS} file; then key=value",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with settings (default: those of the first run)"
    )
    add_data_argument(parser)
    add_trust_argument(parser)
    add_accept_argument(parser)
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    names = [word for word in args.models if not is_setting(word)]
    args.overrides = [word for word in args.models if is_setting(word)]
    if len(names) < 2 and not any(map(has_step, names)):
        raise UsageError(
            "two models are compared: name both, for example `strop compare runs/first runs/second`"
        )
    if (args.config or args.overrides or args.data) and all(map(_is_file_of_answers, names)):
        raise UsageError(
            "the answers are all there: settings, --config and --data would do nothing; leave them out"
        )
    with data_of(args):
        return _run(args, names)


def _run(args: argparse.Namespace, names: Sequence[str]) -> int:
    from strop.evaluation.paired_test import compare_paired

    models_answers = _collect_answers(args, names)
    if len(models_answers) < 2:
        raise UsageError(f"{names[0]} is one model alone: name another one to compare it with")
    prompts = _same_prompts(models_answers)
    are_rates = all(answers.has_rate for answers in models_answers)
    if not are_rates:
        prompts = [
            prompt
            for prompt in prompts
            if all(answers.mean_reward(prompt) is not None for answers in models_answers)
        ]
        if not prompts:
            raise ValueError("there is no prompt of which each model has an answer that could be scored")
    values = [
        [answers.rate(prompt) if are_rates else answers.mean_reward(prompt) or 0.0 for prompt in prompts]
        for answers in models_answers
    ]
    compared = [compare_paired(values[0], others, are_rates=are_rates) for others in values[1:]]
    models = [
        _record(answers, by_prompt, prompts, are_rates)
        for answers, by_prompt in zip(models_answers, values, strict=True)
    ]
    if args.json:
        others = [
            {"model": answers.name, **dataclasses.asdict(result)}
            for answers, result in zip(models_answers[1:], compared, strict=True)
        ]
        print_json({"models": models, **dataclasses.asdict(compared[-1]), "comparisons": others})
    else:
        _show(models, compared)
    return 0


def _record(
    answers: Answers, values: Sequence[float], prompts: Sequence[str], are_rates: bool
) -> dict[str, Any]:
    """A model's own number, with its interval."""
    from strop.algorithms.intervals import clustered_interval, mean_interval

    mean = sum(values) / len(values)
    if not are_rates:
        low, high = mean_interval(values, [1] * len(values)) or (None, None)
        return {"model": answers.name, "pass_rate": None, "mean_reward": mean, "low": low, "high": high}
    passed = [answers.passed[prompt] for prompt in prompts]
    low, high = clustered_interval(
        [float(sum(map(bool, some))) for some in passed], [len(some) for some in passed]
    )
    return {"model": answers.name, "pass_rate": mean, "low": low, "high": high}


def _collect_answers(args: argparse.Namespace, names: Sequence[str]) -> list[Answers]:
    """The answers of each, played now or read."""
    if all(map(_is_file_of_answers, names)):
        return [read_answers(Path(name)) for name in names]
    from strop.evaluation.evaluate import evaluate

    sources: list[tuple[str, ModelSource | None]] = []
    for name in names:
        if _is_file_of_answers(name):
            sources.append((name, None))
        else:
            sources += [(point.name, point.source) for point in points_of(name)]
    first = next(
        (source.config for _, source in sources if source is not None and source.config is not None), None
    )
    settings = settings_of(args, first, command="compare", reads=READS)
    quiet_models()
    results = []
    for name, source in sources:
        if source is None:
            results.append(read_answers(Path(name)))
            continue
        with progress_bar(name) as show:
            evaluation = evaluate(with_model(settings, source, args), say=say, on_progress=show)
        results.append(answers_of(name, evaluation.answers, name))
    return results


def _is_file_of_answers(name: str) -> bool:
    return name.endswith(ANSWERS) and Path(name).is_file()


def read_answers(path: Path) -> Answers:
    """Read the answers in a file of `strop eval --out`.

    Raises:
        ValueError: it is something else.
    """
    rows = []
    with open_regular(path) as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} of {path} is no answer of `strop eval --out`")
            rows.append(row)
    return answers_of(path.name, rows, str(path))


def answers_of(name: str, rows: Sequence[Mapping[str, Any]], source: str) -> Answers:
    """Answers by prompt.

    Raises:
        ValueError: a row has no id, or does not say whether it passed and has no score.
    """
    passed: dict[str, list[bool | None]] = defaultdict(list)
    scores: dict[str, list[float]] = defaultdict(list)
    texts: dict[str, str] = {}
    for row in rows:
        sample, is_right, score = row.get("id"), row.get("passed"), finite(row.get("score"))
        is_known = isinstance(is_right, bool) or (is_right is None and score is not None)
        if not isinstance(sample, str) or not is_known:
            raise ValueError(f"an answer in {source} has no id, or does not say whether it passed (`passed`)")
        prompt = sample.rpartition("/")[0] or sample
        passed[prompt].append(is_right)
        scores[prompt] += [] if score is None else [score]
        texts[prompt] = repr(row.get("prompt"))
    return Answers(name=name, passed=passed, scores=scores, texts=texts)


def _same_prompts(models: Sequence[Answers]) -> list[str]:
    """The prompts that all have answered.

    Raises:
        ValueError: they are not the same.
    """
    first = models[0]
    for other in models[1:]:
        differing = [prompt for prompt in first.texts if other.texts.get(prompt) != first.texts[prompt]]
        if differing or len(other.texts) != len(first.texts):
            example = f"; {differing[0]} is another one" if differing else ""
            raise ValueError(
                f"{first.name} and {other.name} were not asked the same: {len(first.texts)} and {len(other.texts)} "
                f"prompts{example}. Let both answer the same data"
            )
    if not first.texts:
        raise ValueError("there is no answer to compare")
    return list(first.texts)


def _show(models: Sequence[Mapping[str, Any]], compared: Sequence[PairedComparison]) -> None:
    names = [plain(model["model"], is_one_line=True) for model in models]
    are_rates = models[0]["pass_rate"] is not None
    for name, model in zip(names, models, strict=True):
        if are_rates:
            interval = f"95 % interval {100 * model['low']:.1f} to {100 * model['high']:.1f}"
            number = f"pass rate {100 * model['pass_rate']:.1f} % ({interval})"
        else:
            number = f"mean reward {model['mean_reward']:.4g}"
            if model["low"] is not None:
                number += f" (95 % interval {model['low']:.4g} to {model['high']:.4g})"
        print_plain(f"{name:<{max(map(len, names))}}  {number}")
    if not are_rates:
        print_plain("no pass rates: nothing says which answers pass, so mean rewards are compared")
    for name, result in zip(names[1:], compared, strict=True):
        numbers = [_shown(value, are_rates, "+") for value in (result.difference, result.low, result.high)]
        print_plain(
            f"{name} less {names[0]}: {numbers[0]}{' points' if are_rates else ''} (95 % interval {numbers[1]} to "
            f"{numbers[2]}), p = {result.p_value:.3g}, on {result.num_prompts} prompts of which {result.num_differing} "
            f"differ"
        )
        print_plain(
            _significance_line(
                result, better=name if result.difference > 0 else names[0], are_rates=are_rates
            )
        )


def _shown(value: float, is_rate: bool, sign: str = "") -> str:
    """A difference in points of a pass rate, or in units of the reward."""
    return format(100 * value, f"{sign}.1f") if is_rate else format(value, f"{sign}.4g")


def _significance_line(result: PairedComparison, *, better: str, are_rates: bool) -> str:
    is_beyond_zero = result.low > 0 or result.high < 0
    if is_beyond_zero and result.p_value < SURE:
        return f"  the interval does not hold 0: {better} is better on prompts of this kind"
    if result.detectable is None:
        return "  no two prompts tell them apart"
    needed = (
        ""
        if result.prompts_needed is None
        else f"; to see the difference found takes about {result.prompts_needed}"
    )
    detectable = (
        f"{_shown(result.detectable, are_rates)}{' points' if are_rates else ''} with a chance of 80 %"
    )
    doubt = (
        f" (the interval does not hold 0, but p is not below {SURE:g}: few prompts differ)"
        if is_beyond_zero
        else ""
    )
    return f"  not told apart{doubt}: this many prompts show a difference of {detectable}{needed}"
