"""The example whose training loop is written out: its numbers, two steps of it, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_files import REPO, load_example

from strop.cli.main import main as strop
from strop.data.tiny_model import make_tiny_model

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """By the first letter."""
    return ord((solution_str or " ")[0]) % 8 / 10
'''


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data and model; the current directory is the root, where the example's paths start."""
    monkeypatch.chdir(REPO)
    load_example("arithmetic/prepare.py").write_data(tmp_path, seed=0, largest=19)
    make_tiny_model(tmp_path / "model", seed=0)
    return tmp_path


def settings(files: Path, model: Path) -> list[str]:
    return [
        f"model.path={model}",
        f"data.train_files=[{files / 'train.parquet'}]",
        f"data.val_files=[{files / 'val.parquet'}]",
    ]


def test_an_answer_is_compared_with_the_others_to_its_prompt() -> None:
    """[1, 0, 0, 0]: mean 0.25, standard deviation 0.5; a group of equal rewards teaches nothing."""
    loop = load_example("own_loop/loop.py")
    rewards = torch.tensor([1.0, 0.3, 0.0, 0.0, 0.3, 0.0])
    advantages = loop.advantages_of(rewards, [[0, 2, 3, 5], [1, 4]])
    assert advantages.tolist() == pytest.approx([1.5, 0, -0.5, -0.5, 0, -0.5], abs=1e-5)


def test_the_loop_is_as_short_as_it_says() -> None:
    lines = (REPO / "examples/own_loop/loop.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


def test_the_loss_keeps_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert strop(["check", "loss", f"{REPO / 'examples/own_loop/loss.py'}:clipped_ratio"]) == 0
    assert "keeps every rule" in capsys.readouterr().out


def test_two_steps_of_the_loop(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = load_example("own_loop/loop.py")
    (files / "reward.py").write_text(REWARD)
    more = [
        f"reward.path={files / 'reward.py'}", "reward.num_workers=1", "trainer.max_steps=2", "resources.num_threads=1"
    ]  # fmt: skip
    rates = loop.main([*settings(files, files / "model"), *more], model=files / "saved")
    assert len(rates) == 2
    assert "step 2: reward 0." in capsys.readouterr().out
    before, after = ((files / name / "model.safetensors").read_bytes() for name in ("model", "saved"))
    assert len(before) == len(after)
    assert before != after


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loop_learns(files: Path) -> None:
    """From about 40 % after fine-tuning to 72 % on the machine of the README."""
    config = str(REPO / "examples/arithmetic/sft.yaml")
    words = ["sft", "--config", config, "--out", str(files / "start"), f"model.path={files / 'model'}"]
    assert strop([*words, f"sft.data.train_files=[{files / 'sft.parquet'}]"]) == 0
    loop = load_example("own_loop/loop.py")
    rates = loop.main(settings(files, files / "start" / "model"), model=files / "saved")
    assert len(rates) == 5
    assert rates[-1] >= rates[0] + 0.12
    assert rates[-1] >= 0.55
