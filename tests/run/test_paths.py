"""Relative paths of settings become absolute ones; other texts stay."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from strop.rewards.config import FunctionConfig, RewardConfig
from strop.run.paths import split_path, with_absolute_paths
from strop.trainer.config import Config


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a model, a data set, files, and a home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("model", "home/rows", "org/name"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("rows.jsonl", "reward.py", "tools.yaml", "chat.jinja"):
        (tmp_path / name).write_text("")
    return tmp_path


def changed(config: Config, section: str, **changes: object) -> Config:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})  # type: ignore[arg-type]


def test_what_is_there_is_named_from_everywhere(here: Path) -> None:
    config = changed(Config(), "model", path="model", chat_template="chat.jinja")
    config = changed(config, "data", train_files=("rows.jsonl", "~/rows@train", "hub:org/rows"))
    config = changed(config, "agent", tools="./tools.yaml")
    config = dataclasses.replace(
        config, reward=RewardConfig(functions=(FunctionConfig(path="reward.py:one"), FunctionConfig()))
    )
    found = with_absolute_paths(config)
    assert (found.model.path, found.model.chat_template) == (f"{here}/model", f"{here}/chat.jinja")
    assert found.data.train_files == (f"{here}/rows.jsonl", f"{here}/home/rows@train", "hub:org/rows")
    assert found.agent.tools == f"{here}/tools.yaml"
    assert [(one.path, one.name) for one in found.reward.functions] == [
        (f"{here}/reward.py", "one"), ("", "compute_score"),
    ]  # fmt: skip
    assert with_absolute_paths(found) is found


@pytest.mark.parametrize(
    "text", ["org/other", "s3://bucket/rows", "{{ messages }}\n" * 400, "\0", "~nobody/rows"]
)
def test_what_is_not_there_stays(here: Path, text: str) -> None:
    assert split_path(text) is None
    config = changed(Config(), "model", path=text)
    assert with_absolute_paths(config) is config


def test_folders_that_are_written_need_not_be_there(here: Path) -> None:
    config = changed(Config(), "data", cache_dir="~/cache")
    config = changed(config, "run", copy_to="copies")
    found = with_absolute_paths(config)
    assert (found.data.cache_dir, found.run.copy_to) == (f"{here}/home/cache", f"{here}/copies")
    elsewhere = changed(Config(), "run", copy_to="s3://bucket/copies")
    assert with_absolute_paths(elsewhere) is elsewhere


def test_an_interpreter_is_a_path_only_where_it_looks_like_one(here: Path) -> None:
    (here / "python3").write_text("")
    config = dataclasses.replace(
        RewardConfig(), sandbox=dataclasses.replace(RewardConfig().sandbox, python="python3")
    )
    assert with_absolute_paths(config) is config
    config = dataclasses.replace(
        RewardConfig(), sandbox=dataclasses.replace(RewardConfig().sandbox, python="./python3")
    )
    assert with_absolute_paths(config).sandbox.python == f"{here}/python3"
