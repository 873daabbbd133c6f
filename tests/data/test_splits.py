from __future__ import annotations

from pathlib import Path

import pytest

from strop.compat.datasets.settings import DatasetClassConfig
from strop.data import DataConfig
from strop.data.readers import load_rows


@pytest.mark.usefixtures("core_alone")
def test_without_the_form_of_classes_files_are_read_and_a_dataset_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    files = (str(tmp_path / "a.jsonl"),)
    assert list(load_rows(DataConfig(train_files=files), "train", None)) == [{"x": 1}, {"x": 2}]
    config = DataConfig(train_files=files, dataset_class=DatasetClassConfig(path="mine.py", name="Mine"))
    sentence = "data.dataset_class is set, but the part of strop for that is missing"
    with pytest.raises(ValueError, match=sentence):
        load_rows(config, "train", None)
