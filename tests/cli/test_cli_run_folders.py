"""A folder that holds runs, in the place of a run: the folder that the quickstart's --out named, for example."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_calls import Project, cli

from strop.protocol import DataProto


@pytest.fixture
def parent(trained: Path, tmp_path: Path) -> Path:
    """A folder with one run and something else."""
    folder = tmp_path / "parent"
    (folder / "data").mkdir(parents=True)
    (folder / "train").symlink_to(trained)
    return folder


def test_the_only_run_of_a_folder_stands_for_it(parent: Path, trained: Path, tmp_path: Path) -> None:
    shown = cli("samples", parent, "--json")
    assert shown.code == 0
    assert f"the run in {parent}: {parent / 'train'}" in shown.err
    assert shown.record["samples"] == cli("samples", trained, "--json").record["samples"]
    assert cli("samples", parent, "--why-dropped", "--json").record["num_issued"] == 12
    assert cli("export", parent, tmp_path / "out").code == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert cli("eval", parent, "data.max_val_prompts=1").code == 0


@pytest.mark.parametrize("words", [["samples"], ["export"], ["eval"], ["generate"]])
def test_of_several_runs_the_user_names_one(parent: Path, trained: Path, words: list[str]) -> None:
    (parent / "again").symlink_to(trained)
    out = [parent / "out"] if words == ["export"] else []
    sentence = cli(*words, parent, *out).sentence
    assert f"{parent} is no run, but holds 2: name one, {parent / 'again'} or {parent / 'train'}" in sentence
    assert "is no run folder" in cli("samples", parent / "data").sentence


def test_others_may_read_every_file_that_they_may_read_beside_it(
    trained: Path, tuned: Path, project: Project, tmp_path: Path
) -> None:
    adapted = tmp_path / "adapted"
    settings = ["--config", project.config, "model.lora.rank=2", "trainer.max_steps=1"]
    assert cli("train", *settings, "--out", adapted).code == 0
    for words in ([trained, tmp_path / "whole"], [adapted, tmp_path / "adapter", "--adapter"]):
        assert cli("export", *words).code == 0
    DataProto.from_single_dict({"a": torch.zeros(2)}).save_to_disk(tmp_path / "batch")
    folders = [
        project.model,
        trained,
        tuned,
        adapted,
        tmp_path / "whole",
        tmp_path / "adapter",
        tmp_path / "batch",
    ]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    mode = (trained / "config.yaml").stat().st_mode
    assert len([path for path in files if path.suffix == ".safetensors"]) >= 9
    assert [path for path in files if path.stat().st_mode != mode] == []
