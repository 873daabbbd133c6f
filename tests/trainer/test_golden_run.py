"""Twenty steps give the committed numbers: bit by bit on the platform they were made on, else within a tolerance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from golden_run import FILE, NUM_STEPS, play, this_platform

from strop.run import Fingerprint
from strop.run.first_difference import compare

TOLERANCE = 1e-3
"""Of each number, as a share of it and in its unit, while the same tokens are sampled."""
MIN_EQUAL_STEPS = 5
"""Steps that sample the same tokens everywhere: rounding may flip one later on, and another run begins."""


def chain(steps: Sequence[dict[str, Any]]) -> list[Fingerprint]:
    return [Fingerprint(step=one["step"], stages=one["stages"], chain=one["chain"]) for one in steps]


def test_the_run_gives_the_committed_numbers(tmp_path: Path) -> None:
    golden, now = json.loads(FILE.read_text(encoding="utf-8")), play(tmp_path)
    assert [one["step"] for one in now["steps"]] == list(range(1, NUM_STEPS + 1))
    assert [one["stages"]["data"] for one in now["steps"]] == [
        one["stages"]["data"] for one in golden["steps"]
    ]
    if golden["platform"] == this_platform():
        assert compare(chain(golden["steps"]), chain(now["steps"])) is None, (
            "the first step and stage that differ; where that is meant, say why and run tests/trainer/golden_run.py"
        )
        assert now["steps"] == golden["steps"], "numbers that no hash stands for"
    check_values(golden["steps"], now["steps"])


def check_values(golden: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> None:
    """Every number of the steps before the first other token is as committed."""
    num_equal = 0
    for expected, found in zip(golden, now, strict=True):
        if expected["stages"]["sampled_tokens"] != found["stages"]["sampled_tokens"]:
            break
        num_equal += 1
        assert found["values"] == pytest.approx(expected["values"], rel=TOLERANCE, abs=TOLERANCE), expected[
            "step"
        ]
    assert num_equal >= MIN_EQUAL_STEPS, f"other tokens are sampled from step {num_equal + 1} on"
