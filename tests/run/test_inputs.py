"""What a run reads from outside its folder is known again: by size and time, then by content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop.run import RunError
from strop.run import inputs as inputs_module
from strop.run.inputs import changes_since, check_inputs, inputs_of, kept_inputs, write_inputs


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, object]:
    """A data file, a model of two files, and a reward file; further settings name nothing that is there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 1.0\n")
    return {
        "data.train_files": [str(tmp_path / "train.jsonl")],
        "model.path": str(tmp_path / "model"),
        "reward.path": str(tmp_path / "reward.py"),
        "reward.functions": [{"path": str(tmp_path / "reward.py"), "name": "other"}, {"path": "", "name": "strop/math"}],
        "model.chat_template": "{{ messages }}" * 400,
        "reward.name": "compute_score",
        "data.prompts_per_step": 4,
    }


def began(tmp_path: Path, settings: dict[str, object]) -> Path:
    write_inputs(tmp_path / "run", inputs_of(settings))
    return tmp_path / "run"


def touched(file: Path, content: bytes) -> None:
    """Another content of the same size, at another time."""
    assert file.stat().st_size == len(content)
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))


def test_nothing_has_changed(tmp_path: Path, settings: dict[str, object]) -> None:
    run = began(tmp_path, settings)
    assert changes_since(run, settings) == []
    for name in ("train.jsonl", "model/model.safetensors", "reward.py"):
        os.utime(tmp_path / name)  # copied, or touched: the content decides
    assert changes_since(run, settings) == []


def test_rows_in_another_order_have_changed(tmp_path: Path, settings: dict[str, object]) -> None:
    run = began(tmp_path, settings)
    touched(tmp_path / "train.jsonl", b'{"prompt": "b"}\n{"prompt": "a"}\n')
    assert changes_since(run, settings) == [
        f"data.train_files[0]={tmp_path / 'train.jsonl'}: has another content"
    ]


def test_each_change_is_named_and_can_be_accepted(tmp_path: Path, settings: dict[str, object]) -> None:
    run = began(tmp_path, settings)
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 0.0\n")
    (tmp_path / "model/config.json").unlink()
    (tmp_path / "model/added.json").write_text("{}")
    with pytest.raises(RunError, match="does not read what it began with: .*--accept-changes") as error:
        check_inputs(run, settings, accept=False)
    for clause in ("config.json is gone", "added.json is new", "reward.py: has another content"):
        assert clause in str(error.value)
    assert len(check_inputs(run, settings, accept=True)) == 4  # the reward file is named by two settings
    assert check_inputs(run, settings, accept=False, only=("data.",)) == []


def test_a_link_that_moved_to_other_weights_has_changed(tmp_path: Path, settings: dict[str, object]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("{}")
    (tmp_path / "other/model.safetensors").write_bytes(bytes(reversed(range(256))) * 4096)
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "model")
    settings = {"model.path": str(link)}
    run = began(tmp_path, settings)
    assert changes_since(run, settings) == []
    link.unlink()
    link.symlink_to(tmp_path / "other")
    assert changes_since(run, settings) == [f"model.path={link}: model.safetensors has another content"]


def test_of_a_large_file_pieces_are_read_and_other_weights_are_seen(
    tmp_path: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs_module, "MAX_BYTES", 1 << 17)
    run = began(tmp_path, settings)
    touched(tmp_path / "model/model.safetensors", bytes(255 - n for n in range(256)) * 4096)
    assert changes_since(run, settings) == [
        f"model.path={tmp_path / 'model'}: model.safetensors has another content"
    ]


def test_what_is_given_anew_is_meant(tmp_path: Path, settings: dict[str, object]) -> None:
    run = began(tmp_path, settings)
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 0.0\n")
    (tmp_path / "other.py").write_text("def compute_score(**_): return 0.5\n")
    anew = {**settings, "reward.path": str(tmp_path / "other.py"), "reward.functions": []}
    assert changes_since(run, anew) == []


def test_a_split_of_a_folder_is_the_folder(tmp_path: Path, settings: dict[str, object]) -> None:
    settings = {"data.train_files": [f"{tmp_path / 'model'}@train"]}
    run = began(tmp_path, settings)
    (tmp_path / "model/config.json").write_text('{"changed": true}')
    assert changes_since(run, settings) == [
        f"data.train_files[0]={tmp_path / 'model'}@train: config.json has another content"
    ]


def test_a_run_of_an_earlier_version_is_not_compared(tmp_path: Path, settings: dict[str, object]) -> None:
    assert changes_since(tmp_path / "run", settings) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"inputs": {"model.path": 3}}'])
def test_a_damaged_record_is_a_sentence(tmp_path: Path, settings: dict[str, object], text: str) -> None:
    (tmp_path / "run/inputs.json").write_text(text)
    with pytest.raises(RunError, match=r"inputs\.json is damaged"):
        changes_since(tmp_path / "run", settings)


def test_what_comes_in_the_place_of_a_file_that_was_gone_is_compared(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    run = began(tmp_path, settings)
    (tmp_path / "train.jsonl").unlink()
    assert changes_since(run, settings) == []  # whoever reads it says so
    write_inputs(run, kept_inputs(run, settings))
    (tmp_path / "train.jsonl").write_text('{"prompt": "z"}\n')
    assert changes_since(run, settings) == [
        f"data.train_files[0]={tmp_path / 'train.jsonl'}: has another content"
    ]
