from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from strop.data import read_rows

ROWS = [
    {"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"style": "rule", "ground_truth": "4"}},
    {
        "prompt": [{"role": "user", "content": "ü\u2028?"}],
        "reward_model": {"style": "rule", "ground_truth": "5"},
    },
]


def write_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    write_lines(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "list.json").write_text(json.dumps(ROWS))
    write_lines(tmp_path / "lines.json", ROWS)
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "folder"))
    for name in ("a.parquet", "a.jsonl", "list.json", "lines.json", "folder"):
        assert read_rows([tmp_path / name]) == ROWS, name


def test_files_are_joined_in_their_order_and_blank_lines_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": \n{"x": 1}\n[2]\n' + "3\n" * 25)
    with pytest.raises(
        ValueError, match=r"line 1 of .*; 26 more lines are broken: 3, 4, 5, .*, 22 and 6 more$"
    ):
        read_rows([tmp_path / "a.jsonl"])
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n\n  \n{"x": 2}\n')
    (tmp_path / "a.jsonl").write_text('{"x": 3}')
    assert read_rows([tmp_path / "b.jsonl", str(tmp_path / "a.jsonl")]) == [{"x": 1}, {"x": 2}, {"x": 3}]


def test_a_missing_file_is_named_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").touch()
    with pytest.raises(FileNotFoundError, match=r"gone\.parquet does not exist.* there are: train\.parquet"):
        read_rows([tmp_path / "gone.parquet"])
    with pytest.raises(FileNotFoundError, match="nor does the folder"):
        read_rows([tmp_path / "nowhere" / "x.jsonl"])


@pytest.mark.parametrize(
    ("name", "there", "meant"),
    [
        ("trian.jsonl", ["train.jsonl", "val.jsonl"], "train.jsonl"),
        ("a.jsonl", ["b.jsonl"], None),
        ("math.parquet", ["gsm8k.parquet"], None),
        ("train.json", ["train.jsonl", "train.parquet"], "train.jsonl"),
        ("train.parquet", ["train.jsonl"], "train.jsonl"),
    ],
)
def test_a_missing_file_is_near_to_those_of_a_like_name(
    tmp_path: Path, name: str, there: list[str], meant: str | None
) -> None:
    for one in there:
        (tmp_path / one).touch()
    with pytest.raises(FileNotFoundError) as caught:
        read_rows([tmp_path / name])
    assert ("did you mean" in str(caught.value)) == (meant is not None)
    assert meant is None or f"did you mean {meant}? " in str(caught.value)


def test_a_missing_relative_file_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"looked in {tmp_path}"):
        read_rows(["x.jsonl"])


def test_files_without_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text("\n")
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": pyarrow.array([], "string")}), tmp_path / "e.parquet"
    )
    for name in ("e.jsonl", "e.parquet"):
        with pytest.raises(ValueError, match=f"{name} has no rows"):
            read_rows([tmp_path / name])
    with pytest.raises(ValueError, match="no data file was named; give a list of"):
        read_rows([])
    with pytest.raises(TypeError, match="takes a list of files"):
        read_rows("x.jsonl")


def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\nhi\n")
    with pytest.raises(ValueError, match=r"ends in '\.csv'; use one of \.parquet, \.jsonl, \.json"):
        read_rows([tmp_path / "a.csv"])


def test_broken_json_is_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": \n')
    with pytest.raises(ValueError, match=r"line 2 of .*a\.jsonl is not valid JSON"):
        read_rows([tmp_path / "a.jsonl"])
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n[1, 2]\n')
    with pytest.raises(ValueError, match=r"line 2 of .*b\.jsonl is a JSON list, not an object"):
        read_rows([tmp_path / "b.jsonl"])
    (tmp_path / "c.json").write_text('[{"x": 1},\n {"x": }]')
    with pytest.raises(ValueError, match="not valid JSON: Expecting value at line 2"):
        read_rows([tmp_path / "c.json"])
    (tmp_path / "d.json").write_text('[{"x": 1}, "text"]')
    with pytest.raises(ValueError, match=r"item 1 of .*d\.json is a JSON str"):
        read_rows([tmp_path / "d.json"])


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as parquet"):
        read_rows([tmp_path / "a.parquet"])
    (tmp_path / "b.jsonl").write_bytes(b'{"x": "\xff"}')
    with pytest.raises(ValueError, match=r"b\.jsonl is not UTF-8 text"):
        read_rows([tmp_path / "b.jsonl"])


def test_folders_that_are_no_single_data_set_say_what_to_name(tmp_path: Path) -> None:
    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ValueError, match=r"splits train, test; name one of them, for example .*splits/train"):
        read_rows([tmp_path / "splits"])
    assert read_rows([tmp_path / "splits" / "test"]) == ROWS[:1]
    assert read_rows([f"{tmp_path / 'splits'}@test"]) == ROWS[:1]
    (tmp_path / "splits" / "train" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read by datasets"):
        read_rows([tmp_path / "splits" / "train"])
