"""Entries of data.train_files that are no local file: hub, URLs, and folders with several splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from strop.data import read_rows
from strop.data.hub_rows import HubSource, parse_hub
from strop.utils import trust


def lines(path: Path, *numbers: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"x": number}) + "\n" for number in numbers))
    return path


def numbers(*entries: str | Path, cache: Path | str = "") -> list[int]:
    return [row["x"] for row in read_rows(list(entries), cache_dir=cache)]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("hub:openai/gsm8k", ("openai/gsm8k", None, "train")),
        ("hub:openai/gsm8k:main@test", ("openai/gsm8k", "main", "test")),
        ("hub:squad@validation[:10%]", ("squad", None, "validation[:10%]")),
        ("hub:a-b/c.d_e:x y", ("a-b/c.d_e", "x y", "train")),
    ],
)
def test_the_parts_of_a_hub_entry(entry: str, expected: tuple[str, str | None, str]) -> None:
    name, config, split = expected
    assert parse_hub(entry) == HubSource(hub="hub:", name=name, config=config, split=split)


@pytest.mark.parametrize("entry", ["hub:", "hub:a/b/c", "hub:a/b@", "hub:a/b:", "hub:a b/c"])
def test_other_hub_entries_are_refused_with_the_form(entry: str) -> None:
    with pytest.raises(ValueError, match=f"data entry '{entry}' names no data set.*write hub:owner/name"):
        read_rows([entry])


def test_a_hub_data_set_is_read_with_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"x": 1}, {"x": 2}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert numbers("hub:me/sums:hard@test", "hub:me/sums") == [1, 2, 1, 2]
    assert asked == [("me/sums", "hard", "test"), ("me/sums", None, "train")]


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("no way\nto the hub"),
        RuntimeError("no way"),
        datasets.exceptions.DatasetNotFoundError("no way"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="'hub:me/sums@test' cannot be read from the hub .*no way") as found:
        read_rows(["hub:me/sums@test"])
    assert "hf download me/sums --repo-type dataset --local-dir DIR) and name DIR@test" in str(found.value)
    assert "\n" not in str(found.value)


def test_a_file_url_is_fetched_once_and_again_when_it_changed(tmp_path: Path) -> None:
    file, cache = lines(tmp_path / "there" / "a.jsonl", 1, 2), tmp_path / "cache"
    assert numbers(file.as_uri(), cache=cache) == [1, 2]
    (copy,) = (cache / "files").iterdir()
    assert [path.name for path in copy.iterdir()] == ["a.jsonl"]
    lines(copy / "a.jsonl", 8)  # were it fetched again, this would be lost
    assert numbers(file.as_uri(), cache=cache) == [8]
    lines(file, 1, 2, 3)
    assert numbers(file.as_uri(), cache=cache) == [1, 2, 3]
    assert len(list((cache / "files").iterdir())) == 2


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files", "elsewhere.data.val_files"])
def test_of_received_settings_only_files_that_the_user_named_are_fetched(key: str, tmp_path: Path) -> None:
    entry = lines(tmp_path / "a.jsonl", 1).as_uri()
    with trust.door():
        trust.close("a run", own={"model.path", "data.prompt_key"})
        with pytest.raises(trust.UntrustedCode, match=f"would run what it names: data files {entry}"):
            numbers(entry, cache=tmp_path / "cache")
        trust.close("a run", own={key})
        assert numbers(entry, cache=tmp_path / "cache") == [1]


def test_files_and_folders_of_other_stores(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/strop-test/set/train-0.jsonl", b'{"x": 1}\n')
    store.pipe_file("/strop-test/set/train-1.jsonl", b'{"x": 2}\n')
    store.pipe_file("/strop-test/set/README.md", b"what it is")
    try:
        assert numbers("memory://strop-test/set/train-1.jsonl", cache=tmp_path) == [2]
        assert numbers("memory://strop-test/set", cache=tmp_path) == [1, 2]
        assert not list(tmp_path.rglob("README.md"))
        assert not list(tmp_path.rglob("fetching-*"))
        store.pipe_file("/strop-test/set/train-1.jsonl", b"{oh\n")
        with pytest.raises(
            ValueError, match="data entry 'memory://strop-test/set/train-1.jsonl', fetched.*line 1"
        ):
            read_rows(["memory://strop-test/set/train-1.jsonl"], cache_dir=tmp_path)
    finally:
        store.rm("/strop-test", recursive=True)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ("memory://strop-test/none.jsonl", "FileNotFoundError.*check the address"),
        ("smoke://a/b.jsonl", "[Pp]rotocol.*use a kind of URL that fsspec knows"),
        ("file:///nowhere/at/all.parquet", "FileNotFoundError"),
    ],
)
def test_urls_that_cannot_be_fetched_are_named(entry: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"data entry '{entry}' cannot be fetched .*{match}"):
        read_rows([entry], cache_dir=tmp_path)


def test_a_half_fetched_folder_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/strop-half/a.jsonl", b'{"x": 1}\n')
    store.pipe_file("/strop-half/b.jsonl", b'{"x": 2}\n')
    original = type(store).get_file

    def get_file(self: Any, name: str, target: str, **options: Any) -> None:
        if name.endswith("b.jsonl"):
            raise TimeoutError("the store is gone")
        original(self, name, target)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(type(store), "get_file", get_file)
            with pytest.raises(ValueError, match="TimeoutError: the store is gone"):
                read_rows(["memory://strop-half"], cache_dir=tmp_path)
        assert list((tmp_path / "files").iterdir()) == []
        assert numbers("memory://strop-half", cache=tmp_path) == [1, 2]
    finally:
        store.rm("/strop-half", recursive=True)


def test_a_fetch_that_another_process_finished_first_takes_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = lines(tmp_path / "a.jsonl", 1), tmp_path / "cache"
    assert numbers(file.as_uri(), cache=cache) == [1]
    (copy,) = (cache / "files").iterdir()
    copy.rename(tmp_path / "theirs")
    local = type(fsspec.filesystem("file"))
    original = local.get_file

    def get_file(self: Any, name: str, target: str, **options: Any) -> None:
        original(self, name, target)
        (tmp_path / "theirs").rename(copy)

    monkeypatch.setattr(local, "get_file", get_file)
    assert numbers(file.as_uri(), cache=cache) == [1]
    assert list((cache / "files").iterdir()) == [copy]


def test_a_folder_of_one_split_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    lines(tmp_path / "flat" / "part-1.jsonl", 2)
    lines(tmp_path / "flat" / "part-0.jsonl", 1)
    lines(tmp_path / "flat" / ".hidden.jsonl", 9)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"x": 3}]), tmp_path / "flat" / "part-2.parquet")
    (tmp_path / "flat" / "dataset_infos.json").write_text("{}")
    assert numbers(tmp_path / "flat") == [1, 2, 3]
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "rows.json").write_text('[{"x": 7}]')
    assert numbers(tmp_path / "json") == [7]


def test_splits_are_never_mixed(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    lines(hub / "data" / "train-00000-of-00002.jsonl", 1)
    lines(hub / "data" / "train-00001-of-00002.jsonl", 2)
    lines(hub / "data" / "test-00000-of-00001.jsonl", 9)
    with pytest.raises(ValueError, match=r"holds files of several splits .*name one split, .*@t"):
        read_rows([hub])
    assert numbers(f"{hub}@train") == [1, 2]
    assert numbers(f"{hub}@test", f"{hub / 'data'}@train") == [9, 1, 2]
    with pytest.raises(ValueError, match="no files of the split 'val'; it holds test-00000"):
        read_rows([f"{hub}@val"])
    lines(tmp_path / "mixed" / "train.jsonl", 1)
    lines(tmp_path / "mixed" / "more.jsonl", 2)
    with pytest.raises(ValueError, match="several splits .more.jsonl, train.jsonl.*mixed@train"):
        read_rows([tmp_path / "mixed"])


def test_folders_of_splits_and_configurations(tmp_path: Path) -> None:
    lines(tmp_path / "default" / "train" / "0000.jsonl", 1)
    lines(tmp_path / "default" / "test" / "0000.jsonl", 2)
    (tmp_path / ".cache" / "x").mkdir(parents=True)
    assert numbers(f"{tmp_path}@test") == [2]
    with pytest.raises(ValueError, match="holds the folders test, train; name one of them"):
        read_rows([tmp_path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no .parquet or .jsonl file"):
        read_rows([tmp_path / "empty"])


def test_an_at_sign_in_a_name_is_no_split(tmp_path: Path) -> None:
    lines(tmp_path / "a@train", 1).rename(tmp_path / "me@home.jsonl")
    assert numbers(tmp_path / "me@home.jsonl") == [1]
    with pytest.raises(FileNotFoundError, match="you@home.jsonl does not exist"):
        read_rows([tmp_path / "you@home.jsonl"])
