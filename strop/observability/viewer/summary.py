"""One run in a few numbers, and what tells several runs apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strop.observability.reward_curve import run_series
from strop.observability.viewer.records import RunRecords
from strop.run import is_run
from strop.run.processes import num_processes

Status = Literal["running", "finished", "failed", "stopped"]
SAMPLE_COUNTS = ("reward/ok", "reward/error", "reward/timeout", "reward/infrastructure")
TOKENS = "perf/total_num_tokens"
_LAST_SHARE = 0.1
"""The reward of a run is the mean over this share of its steps, the last ones."""
_MAX_DEPTH = 3
"""Folders below the one that is named in which runs are looked for."""
_MAX_FOLDERS = 10_000


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Summary of a run: its state, progress and final numbers."""

    name: str
    """The last parts of its path: quickstart's runs are all called train."""
    path: str
    kind: str
    """Command that made it: train, sft, prefer, ..."""
    status: Status
    """stopped: it ended without being finished, and can go on."""
    reason: str = ""
    """Reason of a failure, or the run's own note on its end."""
    created: str = ""
    step: int = 0
    """The last one."""
    seconds: float = 0.0
    """Of all its steps with their validations and checkpoints."""
    steps_per_hour: float | None = None
    device_hours: float | None = None
    """Seconds times the processes that the run is made of."""
    tokens: float | None = None
    """Prompts and answers of all steps."""
    samples: float | None = None
    cost: float | None = None
    """Cost of the judges, in their currency."""
    pass_rate_start: float | None = None
    """Validation before the first step; None without one."""
    pass_rate_final: float | None = None
    """The last validation so far."""
    low: float | None = None
    high: float | None = None
    """Its 95 % Wilson interval."""
    best_step: int | None = None
    best_pass_rate: float | None = None
    """Of the best validation; best_step is that of the highest mean reward where validations have no pass rates."""
    val_reward: float | None = None
    """Mean reward of the last validation."""
    best_val_reward: float | None = None
    """Of the best validation, where validations have no pass rates."""
    reward: float | None = None
    """Mean over the last tenth of the steps."""
    loss: float | None = None
    """Of a fine-tuning: the last step's."""


def summary_of(records: RunRecords) -> RunSummary:
    """Summary of the records, as they were last read."""
    steps = {event["step"]: event for event in records.of_kind("step")}
    seconds = math.fsum(_number(event.get("seconds")) or 0.0 for event in steps.values())
    validations = records.of_kind("validation")
    first = validations[0] if validations and validations[0]["step"] == 0 else {}
    last = validations[-1] if validations else {}
    rated = _by_number(validations, "pass_rate")
    rewarded = [] if len(rated) == len(validations) else _by_number(validations, "reward")
    best = max(rewarded or rated, default=(None, None))
    status, reason = _state(records)
    processes = num_processes(records.config)
    losses = [loss for event in steps.values() if (loss := _number(event.get("loss"))) is not None]
    numbers = records.metrics.values()
    return RunSummary(
        name=name_of(records.path),
        path=str(records.path),
        kind=_kind(records.info),
        status=status,
        reason=reason,
        created=str(records.info.get("created", "")),
        step=max([*steps, *records.metrics], default=0),
        seconds=seconds,
        steps_per_hour=3600 * len(steps) / seconds if seconds else None,
        device_hours=seconds * processes / 3600 if processes else None,
        tokens=_sum(record.get(TOKENS) for record in numbers),
        samples=_sum(record.get(name) for record in numbers for name in SAMPLE_COUNTS),
        cost=_sum(value for record in numbers for name, value in record.items() if name.endswith("/cost")),
        pass_rate_start=_number(first.get("pass_rate")),
        pass_rate_final=_number(last.get("pass_rate")),
        low=_number(last.get("low")),
        high=_number(last.get("high")),
        best_pass_rate=None if rewarded else best[0],
        best_step=best[1],
        val_reward=_number(last.get("reward")),
        best_val_reward=best[0] if rewarded else None,
        reward=_last_reward(records),
        loss=losses[-1] if losses else None,
    )


def _by_number(validations: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, int]]:
    """This number of each validation that has it, with the step."""
    return [
        (number, validation["step"])
        for validation in validations
        if (number := _number(validation.get(name))) is not None
    ]


def name_of(path: Path) -> str:
    """Name of a run for people."""
    full = path.resolve()
    return f"{full.parent.name}/{full.name}" if full.name in ("train", "sft") else full.name


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The runs that are named, and those below folders that are named, each once, the newest last.

    Raises:
        FileNotFoundError: a name belongs to nothing.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there: name a run folder, or a folder of runs")
        for run in _below(path, _MAX_DEPTH, [_MAX_FOLDERS]):
            folders.setdefault(run.resolve(), run)
    return sorted(folders.values(), key=lambda run: (run / "run.json").stat().st_mtime)


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Full keys of the settings in which these configurations are not all the same."""
    flat = [flattened(config) for config in runs]
    keys = {key for settings in flat for key in settings}
    return sorted(key for key in keys if len({repr(settings.get(key)) for settings in flat}) > 1)


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Full keys and values of a configuration."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _below(folder: Path, depth: int, budget: list[int]) -> list[Path]:
    if is_run(folder):
        return [folder]
    budget[0] -= 1
    if depth == 0 or budget[0] < 0:
        return []
    try:
        entries = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())
    except OSError:  # a folder of somebody else
        return []
    return [run for entry in entries for run in _below(entry, depth - 1, budget)]


def _state(records: RunRecords) -> tuple[Status, str]:
    if finished := records.of_kind("finished"):
        return "finished", str(finished[-1].get("reason", ""))
    if records.is_running():
        return "running", ""
    ends = [
        event
        for event in records.events
        if event["kind"] in ("crashed", "interrupted", "resumed", "restarted", "preflight")
    ]
    last = ends[-1] if ends else {"kind": ""}
    if last["kind"] == "crashed":
        return "failed", str(last.get("error", "")).partition("\n")[0]
    if last["kind"] == "preflight" and last.get("verdict") == "refused":
        return "failed", "refused by the preflight"
    return "stopped", str(last.get("error", "")).partition("\n")[0] if last["kind"] == "interrupted" else ""


def _kind(info: Mapping[str, Any]) -> str:
    command = info.get("command")
    return str(command[1]) if isinstance(command, list) and len(command) > 1 else ""


def _last_reward(records: RunRecords) -> float | None:
    ordered = [{"step": step, **records.metrics[step]} for step in sorted(records.metrics)]
    rewards = [
        value for curve in run_series(ordered) if curve.name == "reward" for _, value in curve.points()
    ]
    last = rewards[-max(round(_LAST_SHARE * len(rewards)), 1) :]
    return math.fsum(last) / len(last) if last else None


def _sum(values: Any) -> float | None:
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) if numbers else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
