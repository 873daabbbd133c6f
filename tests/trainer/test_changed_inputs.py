"""A run whose data, rewards or models were changed under it says so before it goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from safetensors.torch import load_file, save_file
from tiny_runs import Project, resume_in, train_in

from strop.cli.main import main
from strop.run import RunError
from strop.trainer.start import resume_run


def started(project: Project, folder: Path, *settings: str) -> Path:
    """A run of one step that could go on."""
    train_in(
        folder, project.config("trainer.max_steps=1", "run.save_every=1", "data.val_files=[]", *settings)
    )
    return folder


def own_files(project: Project, folder: Path) -> list[str]:
    """Settings with copies of the data and the reward file, which a test may change."""
    folder.mkdir()
    (folder / "train.parquet").write_bytes(project.task.train.read_bytes())
    (folder / "reward.py").write_text((project.folder / "reward.py").read_text())
    return [f"data.train_files=['{folder / 'train.parquet'}']", f"reward.path='{folder / 'reward.py'}'"]


def test_rows_in_another_order_are_refused_and_can_be_accepted(project: Project, tmp_path: Path) -> None:
    run = started(project, tmp_path / "run", *own_files(project, tmp_path / "files"))
    data = tmp_path / "files/train.parquet"
    rows = parquet.read_table(data)
    parquet.write_table(rows.take(list(reversed(range(len(rows))))), data)
    with pytest.raises(
        RunError, match=r"data.train_files\[0\]=.*train.parquet: has another content.*--accept-changes"
    ):
        resume_in(run, "trainer.max_steps=2")
    said: list[str] = []
    start = resume_run(run, overrides=["trainer.max_steps=2"], say=said.append, accept_changes=True)
    start.run.close()
    assert any("changed since the run began: data.train_files[0]=" in line for line in said)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [len(event["changes"]) for event in events if event["kind"] == "inputs_changed"] == [1]
    resume_in(run, "trainer.max_steps=2")  # what was accepted is what is compared from here on


def test_another_reward_is_named(project: Project, tmp_path: Path) -> None:
    run = started(project, tmp_path / "run", *own_files(project, tmp_path / "files"))
    reward = tmp_path / "files/reward.py"
    reward.write_text(reward.read_text() + "\n# another version\n")
    with pytest.raises(RunError, match=r"reward.path=.*reward.py: has another content"):
        resume_in(run, "trainer.max_steps=2")


def test_a_run_whose_inputs_are_as_they_were_goes_on(project: Project, tmp_path: Path) -> None:
    run = started(project, tmp_path / "run", *own_files(project, tmp_path / "files"))
    (tmp_path / "files/train.parquet").touch()
    assert len(resume_in(run, "trainer.max_steps=2").records) == 1


def test_an_adapter_is_not_merged_into_weights_that_it_was_not_trained_on(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(project.model, model)
    run = started(project, tmp_path / "run", f"model.path='{model}'", "model.lora.rank=2")
    weights = load_file(model / "model.safetensors")
    save_file({name: 2 * one for name, one in weights.items()}, model / "model.safetensors", {"format": "pt"})
    assert main(["export", str(run), "--out", str(out), "--trust-code"]) == 2
    assert "model.safetensors has another content" in capsys.readouterr().err
    assert not out.exists() or not any(out.iterdir())
    assert main(["export", str(run), "--out", str(out), "--trust-code", "--accept-changes"]) == 0
    assert "changed since the run began: model.path=" in capsys.readouterr().err
