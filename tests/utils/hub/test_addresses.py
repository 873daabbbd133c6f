"""What the name of a model stands for, and models at URLs."""

from __future__ import annotations

import sys
from pathlib import Path

import fsspec
import pytest

from strop.utils.hub.addresses import parse_address
from strop.utils.hub.models import Fetch, fetch_model


def test_a_folder_wins_and_a_mistyped_path_is_no_name_of_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "smollm2").mkdir(parents=True)
    (tmp_path / "models" / "file").write_text("")
    assert parse_address("models/smollm2").is_here
    with pytest.raises(
        ValueError, match=r"the nearest in models is models/smollm2; .* write hub:models/smolm2"
    ):
        parse_address("models/smolm2")
    assert parse_address("hub:models/smolm2").kind == "huggingface"
    for text, word in {
        "models/file": "a file", "./model/x": "there is no model;", "/no/where": "there is no /no;", "gpt2": "ORG/NAME",
        "modelscope:x": "modelscope:ORG/NAME", "https://huggingface.co/a/b/tree/main": "write a/b",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=word):
            parse_address(text)


def test_names_of_hubs_and_urls() -> None:
    found = [
        parse_address(text)
        for text in ("Qwen/Qwen2.5-0.5B@v1", "hf://a/b", "modelscope:a/b@dev", "s3://bucket/folder")
    ]
    assert [(one.kind, one.name, one.revision) for one in found] == [
        ("huggingface", "Qwen/Qwen2.5-0.5B", "v1"), ("huggingface", "a/b", ""), ("modelscope", "a/b", "dev"),
        ("url", "s3://bucket/folder", ""),
    ]  # fmt: skip


def test_a_model_at_a_url_is_fetched_once_for_each_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    memory = fsspec.filesystem("memory")
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"1234", "twin.bin": b"no"}
    for name, body in files.items():
        memory.pipe(f"/bucket/model/{name}", body)
    first = fetch_model("memory://bucket/model", Fetch())
    there = sorted(path.name for path in Path(first.folder).iterdir())
    assert there == [".url", "config.json", "model.safetensors", "tokenizer.json"]
    assert fetch_model("memory://bucket/model", Fetch()).folder == first.folder
    assert fetch_model("memory://bucket/model", Fetch(offline=True)).revision == first.revision
    memory.pipe("/bucket/model/model.safetensors", b"12345")
    second = fetch_model("memory://bucket/model", Fetch())
    assert second.revision != first.revision
    assert (Path(second.folder) / "model.safetensors").read_bytes() == b"12345"
    memory.rm("/bucket", recursive=True)
    with pytest.raises(
        ValueError, match=r"memory://bucket/none' cannot be fetched: FileNotFoundError.*address"
    ):
        fetch_model("memory://bucket/none", Fetch())
    with pytest.raises(ValueError, match="is a URL and has none"):
        fetch_model("memory://bucket/none", Fetch(), revision="main")


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(
        ValueError, match=r"modelscope:a/b' cannot be fetched: .*pip install 'strop\[modelscope\]'"
    ):
        fetch_model("modelscope:a/b", Fetch())
