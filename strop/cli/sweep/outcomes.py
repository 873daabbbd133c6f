"""Outcomes of a sweep's runs, from their own records: a table, a file, and a plot of their curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from strop.observability.reward_curve import PASSES, VALIDATION_REWARD, Series, run_series, save_curve
from strop.observability.trackers.setup import METRICS_FILE, read_metrics
from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.summary import summary_of
from strop.run import RunError, RunFolder, is_run
from strop.utils.terminal import number_text, rate_text

Status = Literal["finished", "failed", "stopped", "waiting"]
PICTURE = "sweep.png"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Status and final numbers of one run."""

    name: str
    folder: str
    settings: dict[str, str]
    """Settings in which the runs differ, as they were typed."""
    status: Status
    """stopped: it can go on; waiting: it was not begun."""
    reason: str = ""
    """Reason of a failure."""
    steps: int = 0
    pass_rate: float | None = None
    """Pass rate of the last validation; None without one, and where nothing decides which answers pass."""
    low: float | None = None
    high: float | None = None
    """Its 95 % Wilson interval."""
    best_step: int | None = None
    """Checkpoint with the best validation."""
    best_pass_rate: float | None = None
    val_reward: float | None = None
    """Mean reward of the last validation."""
    reward: float | None = None
    """Mean over the last tenth of the steps."""
    steps_per_hour: float | None = None
    """Steps by the time that they took with their validations; starts and checkpoints are not in it."""


def outcome_of(folder: Path, chosen: Sequence[str], *, failure: str = "") -> Outcome:
    """Read the outcome of a run from its records.

    Args:
        folder: of the run, which may not be there.
        chosen: overrides that are its own.
        failure: why its process failed; "" if it did not.
    """
    settings = dict(_setting(override) for override in chosen)
    status: Status = "failed" if failure else "waiting"
    outcome = Outcome(name=folder.name, folder=str(folder), settings=settings, status=status, reason=failure)
    if not is_run(folder):
        return outcome
    try:
        with RunFolder.open(folder, read_only=True) as run:
            return _of_run(run, outcome)
    except RunError as error:
        return replace(outcome, status="failed", reason=failure or str(error))


def _setting(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def _of_run(run: RunFolder, outcome: Outcome) -> Outcome:
    records = RunRecords(run.path)
    records.read_on()
    summary = summary_of(records)
    best = run.checkpoints.best()
    is_finished = summary.status == "finished"
    return replace(
        outcome,
        status="finished" if is_finished else "failed" if outcome.reason else "stopped",
        reason="" if is_finished else outcome.reason,
        steps=summary.step,
        pass_rate=summary.pass_rate_final,
        low=summary.low,
        high=summary.high,
        best_step=None if best is None else best[0],
        best_pass_rate=None if best is None or summary.pass_rate_final is None else best[1],
        val_reward=summary.val_reward,
        reward=summary.reward,
        steps_per_hour=summary.steps_per_hour,
    )


def curves(folder: Path) -> list[Series]:
    """Reward and pass rate of a run, where its metrics were written."""
    file = folder / METRICS_FILE
    return run_series(read_metrics(file)) if file.is_file() else []


def best_of(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The run that ended best: by the pass rate, without one by the mean reward of its last validation, without
    validations by the reward; None where none has a number."""
    finished = [outcome for outcome in outcomes if outcome.status == "finished"]
    for name in ("pass_rate", "val_reward", "reward"):
        candidates = [outcome for outcome in finished if getattr(outcome, name) is not None]
        if candidates:
            return max(candidates, key=lambda outcome: float(getattr(outcome, name)))
    return None


def draw(path: Path, outcomes: Sequence[Outcome]) -> Path | None:
    """A picture of the pass rates over the steps, without them of the mean rewards of validations, without validations
    of the rewards; None where there is no point."""
    named_curves = [(outcome.name, curve) for outcome in outcomes for curve in curves(Path(outcome.folder))]
    for metric in (PASSES, VALIDATION_REWARD, "reward"):
        series = [
            Series(name=name, steps=curve.steps, values=curve.values, is_line=curve.is_line)
            for name, curve in named_curves
            if curve.name == metric and curve.points()
        ]
        if series:
            return save_curve(path, series, title=f"{metric} of the runs in {path.parent.name}")
    return None


def table(outcomes: Sequence[Outcome]) -> Any:
    """The outcomes as a table of `rich`, one row per run; the best one has a star."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE)
    grid.add_column("settings", overflow="fold", min_width=16)
    for name in ("pass rate (95 %)", "reward", "best step", "steps", "steps/h"):
        grid.add_column(name, justify="right", no_wrap=name.startswith("pass"))
    grid.add_column("status", no_wrap=True)
    best = best_of(outcomes)
    for outcome in outcomes:
        grid.add_row(
            Text(("* " if outcome is best else "") + _settings_of(outcome)), _rate(outcome),
            number_text(outcome.reward),
            "-" if outcome.best_step is None else str(outcome.best_step),
            str(outcome.steps),
            "-" if outcome.steps_per_hour is None else f"{outcome.steps_per_hour:.0f}", outcome.status,
        )  # fmt: skip
    return grid


def _settings_of(outcome: Outcome) -> str:
    """Last parts of the keys, where they tell the settings apart."""
    short = [key.rpartition(".")[2] for key in outcome.settings]
    keys = short if len(set(short)) == len(short) else list(outcome.settings)
    return " ".join(f"{key}={value}" for key, value in zip(keys, outcome.settings.values(), strict=True))


def _rate(outcome: Outcome) -> str:
    if outcome.pass_rate is None:
        return "-" if outcome.val_reward is None else f"mean reward {outcome.val_reward:.4g}"
    return rate_text(outcome.pass_rate, outcome.low, outcome.high)
