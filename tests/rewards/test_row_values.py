"""Values of rows on their way to reward functions: those with one obvious reading, and those with none."""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_cases import make_prompt, score_all, write_reward

from strop.api.inputs import data_files
from strop.rewards import RewardConfig
from strop.rewards.outcome import Outcome

SHOWS = "def compute_score(ground_truth, extra_info): return {'score': 1.0, 'seen': repr(ground_truth)}"


def scored(tmp_path: Path, value: Any) -> Outcome:
    config = RewardConfig(path=write_reward(tmp_path, SHOWS), num_workers=1)
    return score_all(config, ["x"], make_prompt(ground_truth=value))[0]


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (decimal.Decimal("72.50"), "72.5"),
        (decimal.Decimal("72.00"), "72"),
        (decimal.Decimal("NaN"), "'NaN'"),
        (decimal.Decimal("1e9999999"), "'1E+9999999'"),  # as a number it would take minutes
        (decimal.Decimal("1e-9999999"), "'1E-9999999'"),
        (uuid.UUID(int=1), "'00000000-0000-0000-0000-000000000001'"),
        (datetime.date(2024, 1, 2), "'2024-01-02'"),
        (datetime.datetime(2024, 1, 2, 3, 4), "'2024-01-02T03:04:00'"),
        (b"xy", "b'xy'"),
        (np.float32(0.5), "0.5"),
        (np.int64(3), "3"),
        ([decimal.Decimal("1"), {"at": datetime.time(1, 2)}], "[1, {'at': '01:02:00'}]"),
    ],
)
def test_values_with_one_reading_are_read(tmp_path: Path, value: Any, seen: str) -> None:
    assert scored(tmp_path, value).parts["seen"] == seen


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            1j,
            "row 3 has a complex in ground_truth, which cannot be sent to the processes that score (1j): write it as",
        ),
        (
            {"wait": [datetime.timedelta(hours=1)]},
            "row 3 has a datetime.timedelta in ground_truth.wait[0], which",
        ),
    ],
)
def test_values_without_a_reading_name_row_and_column(tmp_path: Path, value: Any, sentence: str) -> None:
    outcome = scored(tmp_path, value)
    assert outcome.kind == "error"
    assert outcome.error.startswith(sentence)


def test_rows_in_memory_name_row_and_column(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 1.0}, {"prompt": "b", "answer": 2j}]
    with pytest.raises(
        ValueError, match=r"data has a complex in row 1, column 'answer', .* \(2j\): give text"
    ):
        data_files(rows, "data", tmp_path)
    with pytest.raises(ValueError, match="data has columns whose rows do not fit together: .*one type"):
        data_files([{"image": b"", "answer": 1.0}, {"image": b"", "answer": "x"}], "data", tmp_path)
    mixed = [{"prompt": "a", "answer": 1.0}, {"prompt": "b", "answer": "x"}]
    (file,) = data_files(mixed, "data", tmp_path)  # as JSON lines, in which each value has its own type
    assert [json.loads(line) for line in Path(file).read_text().splitlines()] == mixed
    assert data_files([{"prompt": "a", "answer": uuid.UUID(int=1)}], "data", tmp_path)
