"""`strop eval` of several models: one table, one picture, and what each point that was gained had cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.output import plain, print_plain, say
from strop.evaluation.points import Point

if TYPE_CHECKING:
    from strop.evaluation.evaluate import Evaluation
    from strop.evaluation.paired import PairedComparison
    from strop.evaluation.spending import Spent


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model with what it can do."""

    point: Point
    evaluation: Evaluation
    gain: PairedComparison | None
    """Against the first model, on the same prompts; None for the first one."""
    spent: Spent | None
    """By its run, since the first model where that is a checkpoint of the same run; None where records do not say."""

    @property
    def tokens_per_answer(self) -> float:
        """Mean."""
        lengths = [report.num_response_tokens for report in self.evaluation.total.reports]
        return sum(lengths) / len(lengths)

    def per_point(self) -> dict[str, float]:
        """What each percentage point of the gain has cost; empty where no gain is shown or its cost not known."""
        if self.spent is None or self.gain is None or self.gain.low <= 0:
            return {}
        points = 100 * self.gain.difference
        found = {"tokens": self.spent.tokens / points}
        if self.spent.device_hours is not None:
            found["device_hours"] = self.spent.device_hours / points
        return found


def measured(found: Sequence[tuple[Point, Evaluation]]) -> list[Measured]:
    """The models beside the first one."""
    from strop.evaluation.paired import compare_paired

    first, base = found[0]
    rates = [_rates(evaluation) for _, evaluation in found]
    made = []
    for (point, evaluation), own in zip(found, rates, strict=True):
        is_same_run = first.run is not None and first.run == point.run
        before = first.spent if is_same_run else None
        spent = point.spent if point.run is not None and (before is not None or not is_same_run) else None
        made.append(
            Measured(
                point=point,
                evaluation=evaluation,
                gain=None if evaluation is base else compare_paired(rates[0], own),
                spent=spent if spent is None or before is None else spent.less(before),
            )
        )
    return made


def _rates(evaluation: Evaluation) -> list[float]:
    """Pass rate on each prompt, in the order of the data."""
    passed: dict[str, list[bool]] = {}
    for report in evaluation.total.reports:
        passed.setdefault(report.uid, []).append(report.passes)
    return [sum(some) / len(some) for some in passed.values()]


def record_of(one: Measured, numbers: dict[str, object]) -> dict[str, object]:
    """One model as JSON; `numbers` are those of `strop eval` of one model."""
    return {
        "model": one.point.name,
        "step": one.point.step,
        **numbers,
        "tokens_per_answer": one.tokens_per_answer,
        "spent": None if one.spent is None else dataclasses.asdict(one.spent),
        "gain": None if one.gain is None else dataclasses.asdict(one.gain),
        "per_point": one.per_point(),
    }


def show(models: Sequence[Measured]) -> None:
    """The table, and below it what the gain has cost."""
    rows = [_row(one) for one in models]
    names = list(dict.fromkeys(name for row in rows for name in row))
    widths = {name: max(len(name), *(len(row.get(name, "-")) for row in rows)) for name in names}
    for row in [{name: name for name in names}, *rows]:
        cells = [f"{row.get(name, '-'):{'<' if name == 'model' else '>'}{widths[name]}}" for name in names]
        print_plain("  ".join(cells).rstrip())
    for one in models:
        cost = one.per_point()
        if cost:
            hours = f", {cost['device_hours']:.3g} device-hours" if "device_hours" in cost else ""
            print_plain(
                f"{plain(one.point.name, is_one_line=True)}: {cost['tokens']:,.0f} tokens{hours} of training for each "
                f"point over {plain(models[0].point.name, is_one_line=True)}"
            )


def _row(one: Measured) -> dict[str, str]:
    """One line of the table, by column."""
    from strop.evaluation.rates import maj_at, pass_at

    total = one.evaluation.total
    low, high = total.interval()
    row = {
        "model": plain(one.point.name, is_one_line=True),
        "pass rate": f"{100 * total.pass_rate:.1f} %",
        "95 % interval": f"{100 * low:.1f} to {100 * high:.1f}",
    }
    for label, rates in (("pass", pass_at(total)), ("maj", maj_at(total))):
        if rates:
            k = max(rates)
            row[f"{label}@{k}"] = f"{100 * rates[k].rate:.1f} %"
    row["tokens/answer"] = f"{one.tokens_per_answer:.1f}"
    if one.gain is not None:
        row["gain"] = f"{100 * one.gain.difference:+.1f}"
        row["95 % interval of it"] = f"{100 * one.gain.low:+.1f} to {100 * one.gain.high:+.1f}"
    if one.spent is not None:
        row["tokens trained"] = f"{one.spent.tokens:,.0f}"
        if one.spent.device_hours is not None:
            row["device-hours"] = f"{one.spent.device_hours:.3g}"
    return row


def draw(path: Path, models: Sequence[Measured]) -> None:
    """Pass rates with their intervals over the steps of each run; other models as level lines.

    Raises:
        OSError: the file cannot be written.
    """
    from strop.trainer.curve import figure_of

    figure = figure_of([], title="pass rate")
    axes: Any = figure.get_axes()[0]
    runs: dict[Path, list[Measured]] = {}
    for one in models:
        if one.point.run is not None:
            runs.setdefault(one.point.run, []).append(one)
            continue
        axes.axhline(one.evaluation.total.pass_rate, linestyle="--", label=one.point.name, linewidth=1)
    for run, own in runs.items():
        ordered = sorted(own, key=lambda one: one.point.step or 0)
        rates = [one.evaluation.total.pass_rate for one in ordered]
        bounds = [one.evaluation.total.interval() for one in ordered]
        errors = [
            [max(rate - low, 0.0) for rate, (low, _) in zip(rates, bounds, strict=True)],
            [max(high - rate, 0.0) for rate, (_, high) in zip(rates, bounds, strict=True)],
        ]
        steps = [one.point.step or 0 for one in ordered]
        axes.errorbar(steps, rates, yerr=errors, fmt="o-", capsize=3, label=run.name, linewidth=1.5)
    axes.set(ylabel="pass rate, with its 95 % interval", ylim=(0, 1))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    say(f"picture: {path}")
