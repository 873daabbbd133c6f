"""What a run reads from outside its folder is known again: by size and time, then by content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop.run import RunError, input_files
from strop.run.inputs import changes_since, check_inputs, inputs_of, merged_inputs, write_inputs


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
        "reward.functions": [
            {"path": str(tmp_path / "reward.py"), "name": "other"},
            {"path": "", "name": "strop/math"},
        ],
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
    monkeypatch.setattr(input_files, "MAX_BYTES", 1 << 17)
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
    write_inputs(run, merged_inputs(run, settings))
    (tmp_path / "train.jsonl").write_text('{"prompt": "z"}\n')
    assert changes_since(run, settings) == [
        f"data.train_files[0]={tmp_path / 'train.jsonl'}: has another content"
    ]


def test_modules_that_a_reward_file_imports_are_compared(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "reward.py").write_text("import json\nfrom helpers.text import clean\n")
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers/__init__.py").write_text("")
    (tmp_path / "helpers/text.py").write_text("import words\nimport reward\n")
    (tmp_path / "helpers/words.py").write_text("ALL = 1\n")
    (tmp_path / "other.py").write_text("")
    settings = {"reward.path": str(tmp_path / "reward.py")}
    run = began(tmp_path, settings)
    for name in ("helpers/words.py", "helpers/text.py", "other.py"):
        (tmp_path / name).write_text("ALL = 2\n")
    where = f"reward.path={tmp_path / 'reward.py'}"
    assert changes_since(run, settings) == [
        f"{where}: helpers/text.py has another content",
        f"{where}: helpers/words.py is gone",  # nobody imports it any more
    ]


def test_files_that_a_yaml_file_names_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "tools", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "tools/all.yaml").write_text(
        "tools: [{class_name: './shop.py:Shop', config: {rows: rows.jsonl}}, {class_name: bank.Bank}, {name: a.b}]\n"
    )
    for name in ("tools/shop.py", "here/rows.jsonl", "tools/bank.py"):
        (tmp_path / name).write_text("1\n")
    monkeypatch.chdir(tmp_path / "here")
    settings = {"agent.tools": str(tmp_path / "tools/all.yaml")}
    run = began(tmp_path, settings)
    for name in ("tools/shop.py", "here/rows.jsonl", "tools/bank.py"):
        (tmp_path / name).write_text("22\n")
    assert [change.partition(": ")[2] for change in changes_since(run, settings)] == [
        "shop.py has another content", "../here/rows.jsonl has another content", "bank.py has another content",
    ]  # fmt: skip


def test_folders_behind_links_are_read_once(tmp_path: Path, settings: dict[str, object]) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/part.bin").write_bytes(b"1")
    (tmp_path / "model/parts").symlink_to(tmp_path / "shared")
    (tmp_path / "shared/again").symlink_to(tmp_path / "model")
    run = began(tmp_path, settings)
    touched(tmp_path / "shared/part.bin", b"2")
    assert changes_since(run, settings) == [
        f"model.path={tmp_path / 'model'}: parts/part.bin has another content"
    ]


def test_of_a_folder_with_very_many_files_names_and_sizes_are_compared(
    tmp_path: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "MAX_FILES", 1)
    settings = {"data.train_files": [str(tmp_path / "model")]}
    run = began(tmp_path, settings)
    touched(tmp_path / "model/config.json", b"[]")
    assert changes_since(run, settings) == []
    (tmp_path / "model/added.json").write_text("{}")
    assert changes_since(run, settings) == [
        f"data.train_files[0]={tmp_path / 'model'}: other files, or of other sizes (3 now)"
    ]
    monkeypatch.setattr(input_files, "MAX_FILES", 4096)
    (tmp_path / "model/added.json").unlink()
    assert changes_since(run, settings) == []


def test_what_was_not_written_since_is_not_read_again(
    tmp_path: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = began(tmp_path, settings)
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 0.0\n")
    read = []
    digest = input_files._digest
    monkeypatch.setattr(
        input_files, "_digest", lambda file, *rest: read.append(file.name) or digest(file, *rest)
    )
    kept = merged_inputs(run, settings)
    assert read == ["reward.py"] * 2, "which two settings name"
    write_inputs(run, kept)
    assert changes_since(run, settings) == []


def test_inputs_of_the_first_form_are_compared_as_they_were_kept(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    """They do not say how much of a file was read, and nothing of the modules that a file imports."""
    (tmp_path / "helper.py").write_text("X = 1\n")
    (tmp_path / "reward.py").write_text("import helper\n\ndef compute_score(**_): return 1.0\n")
    first = inputs_of(settings)
    for one in first.values():
        one["files"].pop("helper.py", None)
        for facts in one["files"].values():
            del facts["read"]
    write_inputs(tmp_path / "run", first)
    for name in ("train.jsonl", "model/model.safetensors", "reward.py"):
        os.utime(tmp_path / name)
    assert changes_since(tmp_path / "run", settings) == []
    (tmp_path / "model/added.json").write_text("{}")
    (tmp_path / "reward.py").write_text("import helper\n\ndef compute_score(**_): return 0.0\n")
    assert [
        change.partition("=")[0] + change.rpartition(":")[2]
        for change in changes_since(tmp_path / "run", settings)
    ] == [
        "model.path added.json is new",
        "reward.path has another content",
        "reward.functions[0].path has another content",
    ]
    write_inputs(tmp_path / "run", merged_inputs(tmp_path / "run", settings))
    (tmp_path / "helper.py").write_text("X = 2\n")
    assert len(changes_since(tmp_path / "run", settings)) == 2, "now they are known"
