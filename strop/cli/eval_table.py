"""`strop eval` of several models: one table, one picture, and what each point that was gained had cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.evaluation.checkpoints import Point
from strop.utils.terminal import plain, print_plain, say

if TYPE_CHECKING:
    from strop.evaluation.cost import TrainingCost
    from strop.evaluation.evaluate import Evaluation
    from strop.evaluation.paired_test import PairedComparison
    from strop.trainer.validation import Validation


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model with what it can do."""

    point: Point
    evaluation: Evaluation
    gain: PairedComparison | None
    """Against the first model, on the same prompts; None for the first one, and where no prompt has rewards of both."""
    are_rates: bool
    """It compares pass rates; else mean rewards."""
    spent: TrainingCost | None
    """By its run, since the first model where that is a checkpoint of the same run; None where records do not say."""

    @property
    def tokens_per_answer(self) -> float:
        """Mean."""
        lengths = [report.num_response_tokens for report in self.evaluation.total.reports]
        return sum(lengths) / len(lengths)

    def per_point(self) -> dict[str, float]:
        """Tokens and device hours per percentage point of the gain; empty where no gain is shown or no cost known."""
        if self.spent is None or self.gain is None or self.gain.low <= 0 or not self.are_rates:
            return {}
        points = 100 * self.gain.difference
        costs = {"tokens": self.spent.tokens / points}
        if self.spent.device_hours is not None:
            costs["device_hours"] = self.spent.device_hours / points
        return costs


def measured(evaluations: Sequence[tuple[Point, Evaluation]]) -> list[Measured]:
    """The models beside the first one."""
    from strop.evaluation.paired_test import compare_known

    first, base = evaluations[0]
    are_rates = all(evaluation.total.num_passed is not None for _, evaluation in evaluations)
    values = [_by_prompt(evaluation, are_rates) for _, evaluation in evaluations]
    models = []
    for (point, evaluation), rates in zip(evaluations, values, strict=True):
        is_same_run = first.run is not None and first.run == point.run
        before = first.spent if is_same_run else None
        spent = point.spent if point.run is not None and (before is not None or not is_same_run) else None
        models.append(
            Measured(
                point=point,
                evaluation=evaluation,
                are_rates=are_rates,
                gain=None if evaluation is base else compare_known(values[0], rates, are_rates=are_rates),
                spent=spent if spent is None or before is None else spent.less(before),
            )
        )
    return models


def _by_prompt(evaluation: Evaluation, are_rates: bool) -> list[float | None]:
    """Pass rate, or mean reward, on each prompt, in the order of the data; None where no answer to it has a reward."""
    values: dict[str, list[float]] = {}
    for report in evaluation.total.reports:
        value = float(bool(report.passes)) if are_rates else report.score
        values.setdefault(report.uid, []).extend([] if value is None else [value])
    return [sum(some) / len(some) if some else None for some in values.values()]


def record_of(model: Measured, numbers: dict[str, object]) -> dict[str, object]:
    """One model as JSON; `numbers` are those of `strop eval` of one model."""
    return {
        "model": model.point.name,
        "step": model.point.step,
        **numbers,
        "tokens_per_answer": model.tokens_per_answer,
        "spent": None if model.spent is None else dataclasses.asdict(model.spent),
        "gain": None if model.gain is None else dataclasses.asdict(model.gain),
        "per_point": model.per_point(),
    }


def show(models: Sequence[Measured]) -> None:
    """The table, and below it what the gain has cost."""
    rows = [_row(model) for model in models]
    names = list(dict.fromkeys(name for row in rows for name in row))
    widths = {name: max(len(name), *(len(row.get(name, "-")) for row in rows)) for name in names}
    for row in [{name: name for name in names}, *rows]:
        cells = [f"{row.get(name, '-'):{'<' if name == 'model' else '>'}{widths[name]}}" for name in names]
        print_plain("  ".join(cells).rstrip())
    for model in models:
        cost = model.per_point()
        if cost:
            hours = f", {cost['device_hours']:.3g} device-hours" if "device_hours" in cost else ""
            print_plain(
                f"{plain(model.point.name, is_one_line=True)}: {cost['tokens']:,.0f} tokens{hours} of training for "
                f"each point over {plain(models[0].point.name, is_one_line=True)}"
            )


def _row(model: Measured) -> dict[str, str]:
    """One line of the table, by column."""
    from strop.evaluation.pass_at_k import maj_at, pass_at

    total = model.evaluation.total
    row = {"model": plain(model.point.name, is_one_line=True)}
    interval = total.interval()
    if model.are_rates and total.pass_rate is not None and interval is not None:
        row["pass rate"] = f"{100 * total.pass_rate:.1f} %"
        row["95 % interval"] = f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}"
    elif total.mean_reward is not None:
        row["mean reward"] = f"{total.mean_reward:.4g}"
        if (interval := total.reward_interval()) is not None:
            row["95 % interval"] = f"{interval[0]:.4g} to {interval[1]:.4g}"
    for label, rates in (("pass", pass_at(total)), ("maj", maj_at(total))):
        if rates:
            k = max(rates)
            row[f"{label}@{k}"] = f"{100 * rates[k].rate:.1f} %"
    row["tokens/answer"] = f"{model.tokens_per_answer:.1f}"
    if model.gain is not None:
        gain = [model.gain.difference, model.gain.low, model.gain.high]
        shown = [f"{100 * value:+.1f}" if model.are_rates else f"{value:+.4g}" for value in gain]
        row["gain"] = shown[0]
        row["95 % interval of it"] = f"{shown[1]} to {shown[2]}"
    if model.spent is not None:
        row["tokens trained"] = f"{model.spent.tokens:,.0f}"
        if model.spent.device_hours is not None:
            row["device-hours"] = f"{model.spent.device_hours:.3g}"
    return row


def _number(validation: Validation, is_rate: bool) -> float:
    """Pass rate or mean reward; NaN where there is none."""
    value = validation.pass_rate if is_rate else validation.mean_reward
    return math.nan if value is None else value


def draw(path: Path, models: Sequence[Measured]) -> None:
    """Pass rates with their intervals over the steps of each run, or mean rewards where a model has no pass rate; other
    models as level lines.

    Raises:
        OSError: the file cannot be written.
    """
    from strop.observability.reward_curve import figure_of

    are_rates = all(model.are_rates for model in models)
    title = "pass rate" if are_rates else "mean reward"
    figure = figure_of([], title=title)
    axes: Any = figure.get_axes()[0]
    runs: dict[Path, list[Measured]] = {}
    for model in models:
        if model.point.run is not None:
            runs.setdefault(model.point.run, []).append(model)
            continue
        axes.axhline(
            _number(model.evaluation.total, are_rates), linestyle="--", label=model.point.name, linewidth=1
        )
    for run, checkpoints in runs.items():
        ordered = sorted(checkpoints, key=lambda model: model.point.step or 0)
        rates = [_number(model.evaluation.total, are_rates) for model in ordered]
        bounds = [model.evaluation.total.interval() if are_rates else None for model in ordered]
        ends = [bound or (rate, rate) for rate, bound in zip(rates, bounds, strict=True)]
        errors = [
            [max(rate - low, 0.0) for rate, (low, _) in zip(rates, ends, strict=True)],
            [max(high - rate, 0.0) for rate, (_, high) in zip(rates, ends, strict=True)],
        ]
        steps = [model.point.step or 0 for model in ordered]
        axes.errorbar(steps, rates, yerr=errors, fmt="o-", capsize=3, label=run.name, linewidth=1.5)
    axes.set(ylabel=title)
    if are_rates:
        axes.set(ylabel="pass rate, with its 95 % interval", ylim=(0, 1))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    say(f"picture: {path}")
