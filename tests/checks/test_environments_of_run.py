"""Certificates of the environments of a run: which ones are inspected, what is kept, and that a fault is only told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.cli.main import main
from strop.run import RunFolder
from strop.trainer import env_certificate
from strop.trainer.config import Config
from strop.trainer.env_certificate import certify_environments
from strop.trainer.loading import load
from strop.trainer.setup import load_training_data
from strop.trainer.start import start_run

WORLDS = '''
import random, time

class Letters:
    """Rewards what a random model can tell apart."""
    def __init__(self, bonus=0.0, sleep=0.0):
        self.bonus, self.sleep = bonus, sleep
    def reset(self, seed, row):
        time.sleep(self.sleep)
        return f"{row['extra_info'].get('word', 'none')} {seed % 2}"
    def step(self, action):
        return "", self.bonus + ord((action or " ")[0]) % 8 / 10, True, {}

class Unseeded(Letters):
    def reset(self, seed, row):
        return str(random.SystemRandom().randint(0, 9))
'''


@pytest.fixture
def worlds(tmp_path: Path) -> str:
    (tmp_path / "worlds.py").write_text(WORLDS, encoding="utf-8")
    return str(tmp_path / "worlds.py")


@pytest.fixture
def settings(tmp_path: Path, tiny_model: Path) -> list[str]:
    """What all runs have in common; their rows are written by `write_rows`."""
    (tmp_path / "reward.py").write_text("def compute_score(**given):\n    return 0.0\n", encoding="utf-8")
    return [
        f"model.path='{tiny_model}'", f"data.train_files=['{tmp_path}/rows.jsonl']", "data.val_files=[]",
        "data.ground_truth_key=null", "data.prompts_per_step=4", "data.max_prompt_tokens=24",
        "data.max_response_tokens=24", "rollout.samples_per_prompt=4", f"reward.path='{tmp_path}/reward.py'",
        "reward.num_workers=1", "trainer.num_epochs=4", "trainer.max_steps=1", "trainer.trackers=[]",
        "resources.num_threads=1", "run.save_every=0",
    ]  # fmt: skip


def write_rows(tmp_path: Path, rows: Sequence[dict[str, Any]]) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": "1+1=", "data_source": "x", **row}) + "\n" for row in rows),
        encoding="utf-8",
    )


def certify(tmp_path: Path, config: Config) -> tuple[list[dict[str, Any]], list[str]]:
    """What is kept, and what is said."""
    said: list[str] = []
    with start_run(tmp_path / "run", config, command=["strop"]).run as run:
        certify_environments(config, load_training_data(config), run, said.append)
        return [event["certificate"] for event in run.events.read("environment")], said


def test_each_environment_is_inspected_with_its_own_rows_and_kept(
    tmp_path: Path, settings: list[str], worlds: str
) -> None:
    rows: list[dict[str, Any]] = [
        {"agent_name": "env_agent", "extra_info": {"word": "a", "env_kwargs": {"bonus": 2.0}}},
        {"agent_name": "env_agent", "extra_info": {"env_name": f"{worlds}:Unseeded"}},
        {"agent_name": "single_turn_agent"},
        {"agent_name": "env_agent", "extra_info": {"word": "b", "env_kwargs": {"bonus": 2.0}}},
    ]
    write_rows(tmp_path, rows)
    config = load(overrides=[*settings, f"agent.environment.name='{worlds}:Letters'"])
    (good, bad), said = certify(tmp_path, config)
    assert good["environment"] == f"{worlds}:Letters"
    # Three seeds each of gold (that knows nothing to say), silence, noise, and noise again, alone and together; ten
    # adversarial answers.
    assert (good["seeds"], good["episodes"], good["max_turns"]) == (3, 5 * 3 + 10, 1)
    assert good["faults"] == []
    assert (good["is_deterministic"], good["is_isolated"], good["seeds_differ"]) == (True, True, True)
    # The rows' bonus of 2, and 0 to 0.7 by the letter; silence is " ", code 32: 0.
    assert 2.0 <= good["reward_range"][0] <= good["reward_range"][1] <= 2.7
    assert good["mean_scores"]["empty"] == 2.0
    assert bad["environment"] == f"{worlds}:Unseeded"
    assert bad["faults"][0].startswith("the same seed does not give the same episode twice")
    assert said[0].startswith(f"environment {worlds}:Letters: 0 faults, checked in ")
    assert said[1].startswith(f"environment {worlds}:Unseeded: 1 fault, checked in ")
    assert said[2] == "  " + bad["faults"][0]


def test_an_environment_that_cannot_be_made_is_one_fault(
    tmp_path: Path, settings: list[str], worlds: str
) -> None:
    write_rows(tmp_path, [{"extra_info": {"env_kwargs": {"colour": 1}}}])
    chosen = ["agent.default_agent=env_agent", f"agent.environment.name='{worlds}:Letters'"]
    config = load(overrides=[*settings, *chosen])
    (certificate,), said = certify(tmp_path, config)
    assert certificate["episodes"] == 0
    (fault,) = certificate["faults"]
    assert "does not take the arguments {'colour': 1}" in fault
    assert said[1:] == [f"  {fault}"]


def test_an_inspection_that_takes_too_long_ends_with_a_note(
    tmp_path: Path, settings: list[str], worlds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_certificate, "LIMIT_S", 0.3)
    write_rows(tmp_path, [{}])
    chosen = ["agent.default_agent=env_agent", f"agent.environment.name='{worlds}:Letters'"]
    config = load(overrides=[*settings, *chosen, "agent.environment.kwargs={sleep: 2.0}"])
    (certificate,), said = certify(tmp_path, config)
    assert certificate["notes"] == ["not inspected within 0.3 s"]
    assert len(said) == 1


def test_more_environments_than_are_inspected_are_counted(
    tmp_path: Path, settings: list[str], worlds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_certificate, "MAX_ENVIRONMENTS", 1)
    rows = [{"extra_info": {"env_name": f"{worlds}:{name}"}} for name in ("Letters", "Unseeded")]
    write_rows(tmp_path, rows)
    config = load(overrides=[*settings, "agent.default_agent=env_agent", f"agent.files=['{worlds}']"])
    (certificate,), said = certify(tmp_path, config)
    assert certificate["environment"] == f"{worlds}:Letters"
    assert said[-1] == "environments that were not checked: 1 more among the first 64 prompts"


def test_a_fault_is_told_before_the_first_step_and_does_not_end_the_run(
    tmp_path: Path, settings: list[str], worlds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path, [{}] * 4)
    chosen = ["agent.default_agent=env_agent", f"agent.environment.name='{worlds}:Unseeded'"]
    assert main(["train", "--out", str(tmp_path / "run"), *settings, *chosen]) == 0
    told = capsys.readouterr().err.splitlines()
    assert any("  the same seed does not give the same episode twice" in line for line in told)
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        (event,) = run.events.read("environment")
        assert event["step"] == 0
        assert event["certificate"]["is_deterministic"] is False
