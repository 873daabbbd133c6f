"""Data sets of hubs that a run has read, and the commands on that run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from strop.data import DataConfig
from strop.run import RunError
from strop.trainer.config import Config
from strop.trainer.model_commits import as_recorded


def settings(*files: str) -> Config:
    return dataclasses.replace(Config(), data=DataConfig(train_files=files, val_files=files[:1]))


def test_a_set_is_read_where_the_run_read_it_and_others_as_they_are_named(tmp_path: Path) -> None:
    commit = "a" * 40
    records = {
        "data hub:me/sums": {"source": "hub:me/sums", "kind": "huggingface", "revision": commit},
        "data modelscope:me/sums#v1": {"source": "modelscope:me/sums", "kind": "modelscope", "revision": "v1/files-0a"},
    }  # fmt: skip
    (tmp_path / "models.json").write_text(json.dumps(records))
    named = (
        "hub:me/sums:hard@test", "hub:me/sums@test#main", "modelscope:me/sums@val#v1", "modelscope:me/sums",
        "hub:you/sums", "rows.jsonl",
    )  # fmt: skip
    found = as_recorded(settings(*named), tmp_path).data
    assert found.train_files == (
        f"hub:me/sums:hard@test#{commit}", "hub:me/sums@test#main", "modelscope:me/sums@val#v1/files-0a",
        "modelscope:me/sums", "hub:you/sums", "rows.jsonl",
    )  # fmt: skip
    assert found.val_files == found.train_files[:1]


def test_a_run_without_records_changes_nothing_and_damaged_ones_are_told(tmp_path: Path) -> None:
    config = settings("hub:me/sums")
    assert as_recorded(config, tmp_path) is config
    (tmp_path / "models.json").write_text("[")
    with pytest.raises(RunError, match=r"models\.json cannot be read"):
        as_recorded(config, tmp_path)
