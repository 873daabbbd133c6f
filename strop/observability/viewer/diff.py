"""Comparison of two runs: whether they did the same, and where they part if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.run import RunFolder
from strop.run.fingerprints import FingerprintChain
from strop.run.first_difference import Difference, common_steps, compare
from strop.run.replay_schedule import ScheduleDifference, compare_schedules, read_schedule
from strop.utils.terminal import shorten

_COLUMNS = {
    "data": "uid",
    "prompt_tokens": "prompt_ids",
    "sampled_tokens": "response_ids",
    "log_probs": "rollout_log_probs",
    "rewards": "score",
    "advantages": "advantage",
}
"""The column of the sample store that shows a stage; loss and weights are of no single sample."""
_SHOWN_CHARS = 60


@dataclass(frozen=True, kw_only=True)
class SampleDifference:
    """The first sample in which two runs differ."""

    id: str
    text: str
    """The difference in words."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of two runs: common steps, differing settings, first difference."""

    steps: Sequence[int]
    """Steps that both have."""
    num_steps: int
    """Number of steps of the longer run."""
    difference: Difference | None
    sample: SampleDifference | None
    """The first sample that shows it; None where no stored sample does."""
    settings: Mapping[str, list[Any]]
    """Settings that differ, by full key, with both values."""
    has_schedules: bool
    """Both ran ahead of training."""
    schedule: ScheduleDifference | None
    """First difference of their schedules before that of the samples."""

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        difference, sample = self.difference, self.sample
        return {
            "equal": difference is None,
            "num_common_steps": len(self.steps),
            "num_equal_steps": len(self.steps) if difference is None else difference.num_equal_steps,
            "step": None if difference is None else difference.step,
            "stage": None if difference is None else difference.stage,
            "sample": None if sample is None else {"id": sample.id, "difference": sample.text},
            "settings": self.settings,
            "cause": _cause(self.schedule) if self.has_schedules and difference is not None else None,
        }


def compared(a: RunFolder, b: RunFolder) -> Comparison:
    """Compare two runs.

    Raises:
        ValueError: they have no step in common.
    """
    prints_a, prints_b = FingerprintChain(a.events).read(), FingerprintChain(b.events).read()
    difference = compare(prints_a, prints_b)
    schedules = read_schedule(a.events), read_schedule(b.events)
    return Comparison(
        steps=common_steps(prints_a, prints_b),
        num_steps=max(len(prints_a), len(prints_b)),
        difference=difference,
        sample=None if difference is None else first_sample(a, b, difference),
        settings=changed_settings(a.info.get("config", {}), b.info.get("config", {})),
        has_schedules=all(schedules),
        schedule=None if difference is None else compare_schedules(*schedules, until=difference.step),
    )


def first_sample(a: RunFolder, b: RunFolder, difference: Difference) -> SampleDifference | None:
    """The first sample of the step that shows the difference; None when no stored sample does."""
    column = _COLUMNS.get(difference.stage)
    step = difference.step
    if column is None or step not in a.samples.steps() or step not in b.samples.steps():
        return None
    rows_a, rows_b = a.samples.read(step), b.samples.read(step)
    if column == "uid":
        return _first_place(rows_a, rows_b)
    rows_by_id = {row["id"]: row for row in rows_b}
    for row in rows_a:
        other = rows_by_id.get(row["id"])
        if other is None:
            return SampleDifference(id=row["id"], text="only the first run has it")
        if row[column] != other[column]:
            return SampleDifference(id=row["id"], text=_in_words(column, row, other))
    return None


def changed_settings(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """The full keys of settings that differ, with both values; a key that one lacks counts as null."""
    changed: dict[str, list[Any]] = {}
    for name in sorted({*a, *b}):
        left, right, key = a.get(name), b.get(name), f"{prefix}{name}"
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            changed |= changed_settings(left, right, f"{key}.")
        elif left != right:
            changed[key] = [left, right]
    return changed


def _first_place(
    rows_a: Sequence[Mapping[str, Any]], rows_b: Sequence[Mapping[str, Any]]
) -> SampleDifference | None:
    for row, other in zip(rows_a, rows_b, strict=False):
        if row["id"] != other["id"]:
            text = f"the second run has {other['id']} ({shorten(other['prompt'] or '', _SHOWN_CHARS)}) in its place"
            return SampleDifference(
                id=row["id"], text=f"{shorten(row['prompt'] or '', _SHOWN_CHARS)}; {text}"
            )
    if len(rows_a) != len(rows_b):
        longer = rows_a if len(rows_a) > len(rows_b) else rows_b
        return SampleDifference(id=longer[min(len(rows_a), len(rows_b))]["id"], text="only one run has it")
    return None


def _in_words(column: str, row: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    left, right = row[column], other[column]
    if not isinstance(left, list) or not isinstance(right, list):
        return f"{column} {left} and {right}"
    position = next(
        (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right))
    )
    values = [f"{part[position]}" if position < len(part) else "ended" for part in (left, right)]
    text = f"{column} part at token {position}: {values[0]} and {values[1]}"
    if column == "response_ids":
        texts = [shorten(side["response"] or "", _SHOWN_CHARS) for side in (row, other)]
        text += f"; the answers are {texts[0]!r} and {texts[1]!r}"
    return text


def _cause(schedule: ScheduleDifference | None) -> str:
    return "numbers" if schedule is None else "schedule"
