"""Data and models of the core without guests: what lies elsewhere, and what other guests read, is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.base.elsewhere import fetch_copy, is_model_elsewhere
from strop.data import DataConfig, read_rows
from strop.data.readers import load_rows
from strop.evaluation.models import find_model
from strop.trainer.config import Config
from strop.trainer.loading import load
from strop.trainer.models import locate, models_elsewhere, records_of_fetched

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
    located = locate(settings(str(folder)), say=print)
    assert (located.config.model.path, located.models) == (str(folder), {})
    assert records_of_fetched() is None
    assert not is_model_elsewhere("Qwen/Qwen2.5-0.5B", "MODEL")
    assert list(models_elsewhere(settings("Qwen/Qwen2.5-0.5B"))) == []
    with pytest.raises(ValueError, match=f"model.path 'Qwen/Qwen2.5-0.5B' is not a folder, .*{MISSING}"):
        locate(settings("Qwen/Qwen2.5-0.5B"), say=print)
    with pytest.raises(ValueError, match="Qwen/Qwen2.5-0.5B does not exist"):
        find_model("Qwen/Qwen2.5-0.5B")
    fetch_copy(tmp_path / "models--a--b" / "snapshots" / ("0" * 40), weights=True)  # nobody to ask


def test_rows_are_held_where_nobody_streams_them(core_alone: None, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n')
    files = (str(tmp_path / "rows.jsonl"),)
    assert load_rows(DataConfig(train_files=files), "train", None) == [{"x": 1}]
    with pytest.raises(ValueError, match="data.streaming is set, but the part of strop for that is missing"):
        load_rows(DataConfig(train_files=files, streaming=True), "train", None)
