"""Reasons of `strop migrate` that a finished run shows: what every run has, whatever verl or TRL are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strop.run import RunFolder


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    """All numbers of each step, by its number."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        one = json.loads(line)
        steps.setdefault(one["step"], {}).update(one)
    return steps


def test_every_step_has_its_numbers(trained: Path) -> None:
    steps = steps_of(trained)
    for number in (1, 2):
        for name in (
            "actor/entropy",
            "actor/loss",
            "critic/score/mean",
            "critic/rewards/mean",
            "training/rollout_probs_diff_max",
        ):
            assert isinstance(steps[number][name], float), (number, name)
    assert max(steps) == 2


def test_the_last_step_is_validated(trained: Path) -> None:
    steps = steps_of(trained)
    validated = [number for number, step in steps.items() if any(name.startswith("val-") for name in step)]
    assert validated == [0, 2], "eval.every is 20"


def test_samples_keep_tokens_text_and_log_probs(trained: Path) -> None:
    with RunFolder.open(trained, read_only=True) as folder:
        samples = folder.samples.read(1)
    assert len(samples) == 6
    for sample in samples:
        assert len(sample["rollout_log_probs"]) == len(sample["response_ids"]) > 0
        assert all(value <= 0 for value in sample["rollout_log_probs"])
