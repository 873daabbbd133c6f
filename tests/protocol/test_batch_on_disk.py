from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.protocol import BatchError, DataProto, jagged, rows
from strop.protocol.folder import from_json, to_json
from strop.protocol.merging import same

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", "$tuple", "$float", "$dict"]), inner, max_size=2)
    ),
    max_leaves=6,
)


def example() -> DataProto:
    tokens = jagged([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3])])
    return DataProto.from_dict(
        {
            "zeta": tokens,
            "mask": tokens > 1,
            "alpha": torch.tensor([[1.0, float("nan")]] * 3, dtype=torch.bfloat16),
            "view": torch.arange(12).view(6, 2)[::2],
        },
        {
            "uid": ["e0-000001", "e0-000002", "e0-000003"],
            "extra_info": [{"a": (1, [2.5])}, None, [float("inf")]],
            "turns": np.array([2, 3, 4], dtype=np.int32),
            "name": np.array(["x", "yy", "é"]),
            "matrix": np.arange(6.0).reshape(3, 2),
        },
        {"temperature": 0.7, "global_token_num": [3, 1], "tags": ("a", None)},
    )


@settings(max_examples=80, deadline=None)
@given(value=PLAIN)
def test_plain_data_reads_back_equal_and_of_the_same_type(value: Any) -> None:
    text = json.dumps(to_json(value, "x"), allow_nan=False)
    back = from_json(json.loads(text))
    assert same(value, back)
    assert repr(value) == repr(back)


def test_a_batch_reads_back_equal(tmp_path: Path) -> None:
    batch = example()
    batch.save_to_disk(tmp_path / "batch")
    back = DataProto.load_from_disk(tmp_path / "batch")
    assert list(back.tensors()) == ["zeta", "mask", "alpha", "view"]
    assert all(same(batch.tensors()[name], column) for name, column in back.tensors().items())
    for name, array in batch.non_tensor_batch.items():
        assert same(array, back.non_tensor_batch[name])
        assert back.non_tensor_batch[name].dtype == array.dtype
    assert back.meta_info == batch.meta_info
    selected = back.tensors()["zeta"] * back.tensors()["mask"]  # equal rows share offsets again
    assert [row.tolist() for row in rows(selected)] == [[0, 2], [], [3]]


def test_the_folder_holds_safetensors_and_json_and_nothing_else(tmp_path: Path) -> None:
    example().save_to_disk(tmp_path / "batch")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "columns.json",
        "tensors.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


def test_batches_without_tensors_or_rows_survive(tmp_path: Path) -> None:
    only_objects = DataProto.from_dict(non_tensors={"a": ["x"]})
    no_rows = example()[[]]
    emptied = example()
    emptied.pop(list(emptied.tensors()), list(emptied.non_tensor_batch))
    for number, batch in enumerate((only_objects, no_rows, emptied, DataProto())):
        batch.save_to_disk(tmp_path / str(number))
        back = DataProto.load_from_disk(tmp_path / str(number))
        assert len(back) == len(batch)
        assert (back.batch is None) == (batch.batch is None)
        assert set(back.tensors()) == set(batch.tensors())
    assert DataProto.load_from_disk(tmp_path / "1").tensors()["alpha"].shape == (0, 2)


def test_a_saved_slice_holds_its_own_rows_only(tmp_path: Path) -> None:
    long = DataProto.from_dict({"ids": jagged([torch.arange(5000) for _ in range(20)])})
    long[3:4].save_to_disk(tmp_path / "slice")
    assert (tmp_path / "slice" / "tensors.safetensors").stat().st_size < 2 * 5000 * 8


def test_what_has_no_json_form_is_named_with_column_and_row(tmp_path: Path) -> None:
    for value, kind in (
        ({1: "a"}, "dictionary with keys that are no strings"),
        ({1, 2}, "set"),
        (b"x", "bytes"),
    ):
        batch = DataProto.from_dict(non_tensors={"extra_info": [None, {"k": [value]}]})
        with pytest.raises(BatchError, match=rf"column 'extra_info', row 1\['k'\]\[0\] is a {kind}"):
            batch.save_to_disk(tmp_path / "batch")
    with pytest.raises(BatchError, match=r"meta_info\['clock'\] is a Tensor"):
        DataProto(meta_info={"clock": torch.zeros(1)}).save_to_disk(tmp_path / "batch")
    days = DataProto.from_dict(non_tensors={"t": np.array(["2020-01-01"], dtype="datetime64[D]")})
    with pytest.raises(BatchError, match="column 't' is an array of datetime64"):
        days.save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_batch_is_replaced_and_other_folders_are_not(tmp_path: Path) -> None:
    example().save_to_disk(tmp_path / "batch")
    example()[:1].save_to_disk(tmp_path / "batch")
    assert len(DataProto.load_from_disk(tmp_path / "batch")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]
    (tmp_path / "home").mkdir()
    with pytest.raises(BatchError, match="exists and is no saved batch"):
        example().save_to_disk(tmp_path / "home")


def test_a_failed_save_leaves_the_earlier_batch_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example().save_to_disk(tmp_path / "batch")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strop.protocol.folder.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        example()[:1].save_to_disk(tmp_path / "batch")
    assert len(DataProto.load_from_disk(tmp_path / "batch")) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


def test_a_damaged_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="is no saved batch: it has no columns.json"):
        DataProto.load_from_disk(tmp_path / "nothing")
    path = tmp_path / "batch"
    example().save_to_disk(path)
    whole = (path / "tensors.safetensors").read_bytes()
    (path / "tensors.safetensors").write_bytes(whole[:-5])
    with pytest.raises(BatchError, match="is damaged"):
        DataProto.load_from_disk(path)
    (path / "tensors.safetensors").unlink()
    with pytest.raises(BatchError, match="is damaged"):
        DataProto.load_from_disk(path)
    (path / "columns.json").write_text('{"format": 9}')
    with pytest.raises(BatchError, match="format 9, this version of strop reads format 1"):
        DataProto.load_from_disk(path)
    (path / "columns.json").write_text('{"format": 1')
    with pytest.raises(BatchError, match="is damaged"):
        DataProto.load_from_disk(path)
