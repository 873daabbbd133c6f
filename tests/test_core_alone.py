"""The core trains a text model with a reward function where the folders of all guests are taken away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_imports import GUESTS, PACKAGE

import strop
from strop.quickstart.task import TaskFiles

REWARD = '''\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Right answers score 1; others by their first character, so that a random model has a signal."""
    return 1.0 if solution_str == ground_truth else ord((solution_str or " ")[0]) % 8 / 10
'''


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package strop, in which there is no guest."""

    def guests_in(folder: str, names: list[str]) -> list[str]:
        return ["__pycache__", *(name for name in names if (Path(folder) / name / "guest.toml").is_file())]

    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(PACKAGE, folder / "strop", ignore=guests_in)
    return folder


def test_the_guests_are_those_that_declare_themselves(core: Path) -> None:
    there = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("guest.toml")}
    assert there == set(GUESTS)
    assert not [name for name in GUESTS if (core / "strop" / name).exists()]


@pytest.mark.slow
def test_the_core_alone_trains(core: Path, tiny_model: Path, tiny_task: TaskFiles, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    settings = [
        f"model.path='{tiny_model}'", f"data.train_files=['{tiny_task.train}']",
        f"data.val_files=['{tiny_task.val}']", "data.prompts_per_step=4", "data.max_prompt_tokens=24",
        "data.max_response_tokens=5", "rollout.samples_per_prompt=4", "reward.path=reward.py",
        "reward.num_workers=1", "trainer.max_steps=2", "resources.num_threads=1", "run.save_every=2",
    ]  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-m", "strop", "train", *settings, "--force", "--out", "run", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["steps"] == 2
    assert "\nsft:" not in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--version"], f"strop {strop.__version__}\n"),
        (["config", "explain", "trainer.seed"], "argument show: invalid choice: 'explain'"),
        (
            ["train", "--from", "s3://bucket/runs/a"],
            "s3://bucket/runs/a is a URL, and the part of strop that fetches",
        ),
        (["replay", "runs/a"], "there is no command 'replay'"),
    ],
)
def test_the_core_alone_says_what_is_missing(core: Path, words: list[str], expected: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "strop", *words],
        env={**os.environ, "PYTHONPATH": str(core)}, cwd=core, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert expected in run.stdout + run.stderr
    assert "Traceback" not in run.stderr
