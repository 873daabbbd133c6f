"""Data and models of the core without guests: what lies elsewhere, and what other guests read, is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.base.elsewhere import fetch_copy
from strop.data import DataConfig, read_rows
from strop.data.readers import load_rows
from strop.trainer.config import Config
from strop.trainer.loading import load
from strop.trainer.models import local_models

MISSING = "is missing from this installation: give a file or folder of this machine"


def settings(model: str) -> Config:
    return load(None, overrides=[f"model.path='{model}'", "data.train_files=['hub:a/b']"])


@pytest.mark.parametrize("entry", ["hub:openai/gsm8k", "modelscope:a/b", "s3://bucket/rows.parquet"])
def test_rows_elsewhere_are_refused_by_name(core_alone: None, entry: str) -> None:
    with pytest.raises(ValueError, match=f"data entry '{entry}' is a .*{MISSING}"):
        read_rows([entry])


def test_models_are_folders(core_alone: None, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert local_models(settings(str(folder))).model.path == str(folder)
    assert local_models(settings("Qwen/Qwen2.5-0.5B"), but=["model.path"]).model.path == "Qwen/Qwen2.5-0.5B"
    with pytest.raises(ValueError, match=f"model.path 'Qwen/Qwen2.5-0.5B' is not a folder, .*{MISSING}"):
        local_models(settings("Qwen/Qwen2.5-0.5B"))
    fetch_copy(tmp_path / "models--a--b" / "snapshots" / ("0" * 40), weights=True)  # nobody to ask


def test_rows_are_held_where_nobody_streams_them(core_alone: None, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n')
    files = (str(tmp_path / "rows.jsonl"),)
    assert load_rows(DataConfig(train_files=files), "train", None) == [{"x": 1}]
    with pytest.raises(ValueError, match="data.streaming is set, but the part of strop for that is missing"):
        load_rows(DataConfig(train_files=files, streaming=True), "train", None)
