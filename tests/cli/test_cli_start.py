"""What a command loads before it has read its settings, in a process of its own."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "torch",
    "tensordict",
    "transformers",
    "datasets",
    "ray",
    "pandas",
    "pyarrow",
    "safetensors",
    "accelerate",
}

PROGRAM = """
import json, sys
from pathlib import Path
from strop.cli.main import main
from strop.trainer.start import start_run
from strop.trainer.loading import load

folder, heavy = Path(sys.argv[1]), set(json.loads(sys.argv[2]))
(folder / "rows.jsonl").touch()
for name, overrides in (("a", []), ("b", ["trainer.seed=2"])):
    config = load(overrides=["model.path=.", "data.train_files=[rows.jsonl]", *overrides])
    start_run(folder / name, config, command=["strop", "train"]).run.close()
(folder / "script.sh").write_text("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo")
found = {}
for words, code in json.loads(sys.argv[3]):
    got = main([word.replace("FOLDER", str(folder)) for word in words])
    loaded = sorted(heavy & {name.partition(".")[0] for name in sys.modules})
    found[" ".join(words)] = [got == code, loaded]
print(json.dumps(found), file=sys.stderr)
"""

COMMANDS = (
    (["config", "show", "algorithm=gspo"], 0),
    (["config", "explain", "algorithm.adv_estimator"], 0),
    (["config", "diff", "FOLDER/a", "FOLDER/b"], 1),
    (["migrate", "verl", "FOLDER/script.sh"], 2),
    (["train", "trainer.max_stepz=3"], 2),
    (["train", "algorithm.adv_estimator=gpro", "model.path=nowhere"], 2),
    (["sft", "sft.num_epochs=0"], 2),
    (["train", "--resume", "FOLDER/a", "trainer.seed=9"], 2),
    (["train", "--resume", "FOLDER"], 2),
    (["eval", "FOLDER/a"], 2),
    (["check", "--config", "FOLDER/a/config.yaml", "trainer.stepps=1"], 2),
    (["quickstart", "--out", "/proc/strop/run"], 2),
    (["train", "--out", "/proc/strop/run", "model.path=x", "data.train_files=[x]"], 2),
)
"""Commands that only read settings, or refuse them, and their exit codes."""


def test_settings_are_read_and_refused_without_the_libraries_of_models(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(sorted(HEAVY)), json.dumps(COMMANDS)],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stderr.splitlines()[-1])
    assert found == {" ".join(words): [True, []] for words, _ in COMMANDS}, run.stderr


@pytest.mark.parametrize(
    "package", ["strop", "strop.agents", "strop.data", "strop.rewards", "strop.agents.tools"]
)
def test_every_name_that_a_package_lists_is_found(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in dir(module):
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nowhere'; it offers "):
        _ = module.nowhere
