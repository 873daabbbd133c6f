"""The guessing example: its files fit together, its stated chances are right, and the model learns to use the hints."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
from example_files import REPO, load_example, read, train

from strop.observability.trackers.setup import METRICS_FILE, read_metrics
from strop.run import RunFolder


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; the current directory is the root, where the example's paths start."""
    monkeypatch.chdir(REPO)
    return load_example("multi_turn_env/prepare.py")


def play(prepare: ModuleType, guess: Callable[[Any], int], *, num_episodes: int) -> float:
    """Share of the episodes that a player wins; it sees the environment, with the bounds that the hints leave."""
    wins = 0.0
    for seed in range(num_episodes):
        env = prepare.load_environment()()
        env.reset(seed, {})
        is_over = False
        while not is_over:
            _, _, is_over, facts = env.step(str(guess(env)))
        wins += facts["acc"]
    return wins / num_episodes


def test_halving_finds_every_number_of_the_guessing_example_and_one_guess_over_and_over_few(
    prepare: ModuleType,
) -> None:
    # Five guesses tell 2^5 - 1 = 31 numbers apart, and there are 16. One guess repeated is right for one number.
    assert play(prepare, lambda env: (env.low + env.high) // 2, num_episodes=200) == 1.0
    assert play(prepare, lambda env: 7, num_episodes=800) == pytest.approx(1 / 16, abs=0.045)  # 5 sigma


def test_a_guess_of_the_guessing_example_is_worth_what_it_tells(prepare: ModuleType) -> None:
    env = prepare.load_environment()()
    env.reset(0, {})
    env.number = 11
    gained = [env.step(guess)[1] for guess in ("8", "3", "eight", "17", "12", "11")]
    # Left: 16 -> 9..16, 8 of them; 3 is below and no word is a number; 17 is above; 12 leaves 9..11; 11 is right.
    left = [16, 8, 8, 8, 8, 3, 0]
    expected = [math.log((n + 1) / (m + 1)) / math.log(17) for n, m in itertools.pairwise(left)]
    assert gained == pytest.approx(expected, abs=1e-12)
    assert sum(gained) == pytest.approx(1.0, abs=1e-12)


def test_the_player_of_the_transcripts_wins_as_often_as_the_readme_says(
    prepare: ModuleType, tmp_path: Path
) -> None:
    won = {}
    for skill in (0.0, 0.5):
        prepare.write_data(
            tmp_path, seed=3, largest=16, max_guesses=5, num_train=20, num_val=10, num_sft=1000, skill=skill
        )
        won[skill], env = 0.0, prepare.load_environment()()
        for number, row in enumerate(read(tmp_path / "sft.parquet")):
            env.reset(3_000_000 + 10 + 20 + number, {})  # the seeds follow those of the other two files
            won[skill] += int(row["messages"][-1]["content"]) == env.number
        won[skill] /= 1000
    # At random 1 - (15/16)^5 = 0.276; five standard deviations of a share of 1000: 0.07.
    assert won[0.0] == pytest.approx(0.276, abs=0.07)
    assert won[0.5] == pytest.approx(0.53, abs=0.08)
    train_rows, val = read(tmp_path / "train.parquet"), read(tmp_path / "val.parquet")
    seeds = [row["extra_info"]["seed"] for row in (*train_rows, *val)]
    assert len(set(seeds)) == len(seeds) == 30
    assert {row["prompt"][0]["content"] for row in (*train_rows, *val)} == {"guess 1-16"}
    assert train_rows[0]["extra_info"]["env_kwargs"] == {"largest": 16, "max_guesses": 5}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("config", ["config.yaml", pytest.param("gigpo.yaml", marks=pytest.mark.slow)])
def test_one_step_of_the_guessing_example_plays_its_environment(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    words = ["--num-train", "8", "--num-val", "2", "--num-sft", "64", "--sft-steps", "1", "--out"]
    monkeypatch.setattr(sys, "argv", ["prepare.py", *words, str(tmp_path)])
    assert prepare.main() == 0
    settings = ("data.prompts_per_step=2", "rollout.samples_per_prompt=2", "trainer.max_steps=1")
    settings = (*settings, "trainer.preflight=false")
    assert train("multi_turn_env", tmp_path, tmp_path / "run", *settings, config=config) == 0
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        rows = run.samples.read(1)
    assert len(rows) == 4
    for row in rows:
        assert row["agent_name"] == "env_agent"
        turns = [message for message in row["messages"] if message["role"] == "assistant"]
        assert 1 <= len(turns) <= 5
        # An answer that the limit cut off is not played.
        assert len(turns) - 1 <= row["agent_facts"]["env_steps"] <= len(turns)
        assert len(row["earlier_sequences"] or ()) == len(turns) - 1  # agent.credit=turn
        assert (row["earlier_sequences"] or [row])[0]["anchor"] == "1-16"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("config", ["config.yaml", "gigpo.yaml"])
def test_the_small_model_learns_to_use_the_hints(
    prepare: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out", str(tmp_path)])
    assert prepare.main() == 0
    capsys.readouterr()
    settings = ("--json", "trainer.max_steps=90", "eval.every=0")
    assert train("multi_turn_env", tmp_path, tmp_path / "run", *settings, config=config) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["pass_rate_start"] < 0.45
    assert result["pass_rate_final"] >= 0.5
    found = [step["reward/acc/mean"] for step in read_metrics(tmp_path / "run" / METRICS_FILE)[-10:]]
    assert fmean(found) > 0.5  # of sampled episodes; 0.4 in the first steps
