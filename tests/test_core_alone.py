"""The core trains a text model with a reward function where the folders of all guests are taken away, and says what it
lacks for more."""

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
        (["config", "show"], "there is no command 'config'"),
        (
            ["train", "--resume", "s3://bucket/runs/a"],
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


LACKING = {
    "optimizer": (
        """
from strop.engines.config import OptimizerConfig
from strop.engines.optimizer import Optimizer
Optimizer([], OptimizerConfig(name="muon"), total_steps=None)
""",
        "optim.name of a role is muon, but the part of strop for that is missing",
    ),
    "received settings": (
        """
from pathlib import Path
from strop.cli.settings import admission
admission(Path("runs/a/config.yaml"), [])
""",
        "somebody else may have written runs/a/config.yaml (--trust-code: use it all the same), but the part of strop",
    ),
    "adapters": (
        """
from strop.engines.adapters import adapters
adapters()
""",
        "model.lora asks for an adapter, but the part of strop for that is missing",
    ),
    "sequence parallelism": (
        """
from strop.engines.tokens import sequence_parallelism
sequence_parallelism()
""",
        "engine.sequence_parallel of a role is above 1, but the part of strop for that is missing",
    ),
    "form of a batch": (
        """
from strop.protocol import DataProto
DataProto().save_to_disk("batch")
""",
        "a batch is written to a folder, but the part of strop for that is missing",
    ),
    "folders of rows": (
        """
from pathlib import Path
from strop.data import read_rows
Path("rows").mkdir()
read_rows(["rows"])
""",
        "data entry rows is a folder, but the part of strop for that is missing",
    ),
    "recipes": (
        """
from strop.algorithms.declarations import adv_estimator_declaration
adv_estimator_declaration("gdpo")
""",
        "unknown advantage estimator 'gdpo'; known: dr_grpo, grpo, ",
    ),
    "calling convention": (
        """
import torch
from strop.algorithms.advantages import estimate_advantages, register_adv_est
register_adv_est("theirs")(lambda token_level_rewards, response_mask, config, index: None)
one = torch.ones(1, 1)
estimate_advantages("theirs", token_level_rewards=one, response_mask=one, group_ids=one[0], settings={})
""",
        "advantage estimator 'theirs' follows verl's calling convention, but the part of strop for that is missing",
    ),
}
"""By place: what asks a guest that is not there, and the beginning of what is said."""


def test_what_a_missing_guest_would_do_is_said_in_a_sentence(core: Path, tmp_path: Path) -> None:
    lines = ["import json", "said = {}"]
    for place, (code, _) in LACKING.items():
        lines += ["try:", *(f"    {line}" for line in code.splitlines())]
        lines += ["except ValueError as error:", f"    said[{place!r}] = str(error)"]
    (tmp_path / "ask.py").write_text("\n".join([*lines, "print(json.dumps(said))"]))
    run = subprocess.run(
        [sys.executable, "ask.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert {place: text[: len(LACKING[place][1])] for place, text in said.items()} == {
        place: sentence for place, (_, sentence) in LACKING.items()
    }
