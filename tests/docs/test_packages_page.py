"""docs/packages.md: its package is installed, and a run in another process trains with each of its parts."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from doc_pages import ROOT, blocks, entry_point_groups
from fork_server import run_program
from program_path import python_path

from strop.data.tiny_model import make_tiny_model

PAGE = ROOT / "docs" / "packages.md"

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return ord((solution_str or " ")[0]) % 8 / 10
"""


def run(words: list[str], folder: Path, path: Path | None = None) -> str:
    """Standard output of a program of Python, with these packages on its path."""
    folders = [folder for folder in (path, ROOT) if folder]
    environment = {**os.environ, "PYTHONPATH": python_path(*folders), "OMP_NUM_THREADS": "1"}
    done = run_program(words, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path with the package of the page."""
    folder = tmp_path_factory.mktemp("package")
    for block in blocks(PAGE):
        if "file" in block.notes:
            file = folder / block.notes["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
    target = folder / "installed"
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "./strop-example"],
        cwd=folder,
        check=True,
        timeout=250,
    )
    return target


def test_the_table_of_the_page_has_every_group() -> None:
    groups = re.findall(r"(?m)^\| `(strop\.\w+)` \|", PAGE.read_text(encoding="utf-8"))
    assert len(groups) > 5
    assert sorted(groups) == sorted(entry_point_groups())


def test_a_run_is_trained_with_the_parts_of_an_installed_package(installed: Path, tmp_path: Path) -> None:
    make_tiny_model(
        tmp_path / "model", seed=0, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64
    )
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": [{"role": "user", "content": f"say {word}"}]} for word in ("ab", "cd", "ef", "gh")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": {"path": "model"},
        "data": {
            "train_files": ["rows.jsonl"],
            "prompts_per_step": 2,
            "max_prompt_tokens": 400,
            "max_response_tokens": 300,
            "default_data_source": "words",
            "ground_truth_key": None,
        },
        "rollout": {"samples_per_prompt": 3},
        "reward": {"path": "reward.py", "num_workers": 1},
        "agent": {"max_assistant_turns": 2},
        "eval": {"before_train": False},
        "trainer": {"num_epochs": 1, "preflight": False},
        "resources": {"num_threads": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    (command,) = [line for block in blocks(PAGE) for line in block.commands if line.startswith("strop train")]
    output = run(["-m", *command.split()], tmp_path, installed)
    out = tmp_path / "runs" / "example"

    assert "strop_example generates" in output, "the engine"
    lines = (out / "lines.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2"], "the tracker"
    samples = []
    for step in ("1", "2"):
        words = ["-m", "strop", "samples", str(out), "--json", "--step", step]
        samples += json.loads(run(words, tmp_path))["samples"]
    assert len(samples) == 12
    assert any("letters" in sample["response"] for sample in samples), "the tool, called by its format"
    groups = defaultdict(list)
    for sample in samples:
        groups[sample["uid"]].append(sample)
    for group in groups.values():
        median = statistics.median(sample["score"] for sample in group)
        for sample in group:
            assert sample["advantage"] == pytest.approx(sample["score"] - median, abs=1e-6), "the estimator"


LOOK_UP = """
from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY as registry
print(registry.names())
registry["grpo"]  # strop's own, which is not looked for in packages
print("grpo is there")
registry["mine"]
"""


@pytest.mark.parametrize(
    ("packages", "sentence"),
    [
        ({"one": "x = 1"}, "the entry point 'mine' of strop.estimators registers no advantage estimator of this name"),
        ({"one": "import no_such_module"}, "comes from the installed package one (strop.estimators: one)"),
        ({"one": "", "two": ""}, "an entry point (strop.estimators) of several installed packages, one, two: uninst"),
    ],
)  # fmt: skip
def test_packages_that_cannot_be_used(tmp_path: Path, packages: dict[str, str], sentence: str) -> None:
    for name, source in packages.items():
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[strop.estimators]\nmine = {name}\ngrpo = {name}\n")
    done = run_program(["-c", LOOK_UP], env={**os.environ, "PYTHONPATH": python_path(tmp_path, ROOT)})
    assert sentence in done.stderr
    assert "'mine'" in done.stdout, "names of packages are known without being imported"
    assert "grpo is there" in done.stdout
