"""The cache of data is bounded: what was not used for longest goes, and nothing that is in use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from references.chat_templates import CHATML, make_tokenizer
from strop.data import DataConfig, PromptDataset, read_rows
from strop.data.cache import entries, prune, remove, use
from strop.data.cache import prompts as kept_prompts
from strop.data.streaming import open_rows


def keep(folder: Path, name: str, size: int, used_at: float) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix:
        path.write_bytes(b"x" * size)
    else:
        path.mkdir()
        (path / "data.jsonl").write_bytes(b"x" * size)
    os.utime(path, (used_at, used_at))
    return path


def names(folder: Path) -> list[str]:
    return [str(entry.path.relative_to(folder)) for entry in entries(folder)]


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    keep(tmp_path, "files/old", 30, 1000)
    keep(tmp_path, "prompts/middle.npz", 30, 2000)
    keep(tmp_path, "rows/late.npy", 30, 3000)
    keep(tmp_path, "other/not-ours.txt", 500, 1)
    assert names(tmp_path) == ["rows/late.npy", "prompts/middle.npz", "files/old"]
    assert prune(tmp_path, 90) == []
    assert [entry.path.name for entry in prune(tmp_path, 60)] == ["old"]
    assert names(tmp_path) == ["rows/late.npy", "prompts/middle.npz"]
    assert sum(entry.num_bytes for entry in entries(tmp_path)) == 60
    assert len(prune(tmp_path, 0)) == 2
    assert (tmp_path / "other" / "not-ours.txt").exists()
    assert prune(tmp_path / "nowhere", 0) == []


def test_what_this_process_or_perhaps_another_one_uses_stays(tmp_path: Path) -> None:
    used = keep(tmp_path, "files/used", 30, 1000)
    use(used)
    os.utime(used, (1000, 1000))  # as if that were long ago
    keep(tmp_path, "files/recent", 30, 10**11)
    keep(tmp_path, "files/old", 30, 2000)
    assert [entry.path.name for entry in prune(tmp_path, 0)] == ["old"]
    assert sorted(names(tmp_path)) == ["files/recent", "files/used"]
    remove(entries(tmp_path))
    assert names(tmp_path) == []


def test_reading_from_the_cache_counts_as_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    rows = [{"prompt": "hi", "data_source": "exact", "answer": str(number)} for number in range(3)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train_files=(str(source),), cache_dir=str(cache), ground_truth_key="answer")
    monkeypatch.setattr(kept_prompts, "MIN_CACHED_ROWS", 1)
    for _ in range(2):
        read_rows([source.as_uri()], cache)
        open_rows([source], cache)
        PromptDataset(rows, make_tokenizer(CHATML), config, "train")
        found = entries(cache)
        assert sorted(entry.path.parent.name for entry in found) == ["files", "prompts", "rows"]
        assert all(entry.used_at > 10**6 for entry in found)
        for entry in found:
            os.utime(entry.path, (1, 1))
    assert prune(cache, 0) == [], "this process uses all of it"
