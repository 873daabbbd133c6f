"""Make the guessing example: episodes to play, transcripts for the warm-up, and a small model.

    python examples/multi_turn_env/prepare.py

writes to runs/data/multi_turn_env: train.parquet and val.parquet (one prompt with a number to find per row),
sft.parquet (transcripts of a player who ignores the hints half of the time), and the folder model (a Qwen3 model of
0.6 million parameters after a warm-up on the transcripts).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from strop.cli.main import main as strop
from strop.data.tiny_model import make_tiny_model

DATA_SOURCE = "guess_number"
CONFIG = Path(__file__).with_name("sft.yaml")


@functools.cache
def load_environment() -> Any:
    """The class of env.py, beside this file."""
    spec = importlib.util.spec_from_file_location("guess_number_env", Path(__file__).with_name("env.py"))
    assert spec is not None, "env.py is there"
    assert spec.loader is not None, "and is Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GuessNumber


def question(largest: int) -> list[dict[str, str]]:
    """The prompt: one user message."""
    return [{"role": "user", "content": f"guess 1-{largest}"}]


def prompt_row(seed: int, *, largest: int, max_guesses: int, split: str, index: int) -> dict[str, Any]:
    """One row: the seed chooses the number."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": question(largest),
        "agent_name": "env_agent",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {
            "split": split, "index": index, "seed": seed,
            "env_kwargs": {"largest": largest, "max_guesses": max_guesses},
        },
    }  # fmt: skip


def sft_row(seed: int, *, largest: int, max_guesses: int, skill: float) -> dict[str, Any]:
    """A transcript: each guess is drawn from what the hints leave (with probability `skill`), or from all numbers."""
    draw = random.Random(f"player {seed}")
    env = load_environment()(largest=largest, max_guesses=max_guesses)
    env.reset(seed, {})
    messages = question(largest)
    while True:
        low, high = (env.low, env.high) if draw.random() < skill else (1, largest)
        guess = str(draw.randint(low, high))
        hint, _, is_over, _ = env.step(guess)
        messages.append({"role": "assistant", "content": guess})
        if is_over:
            return {"messages": messages}
        messages.append({"role": "user", "content": hint})


def write_data(
    folder: Path,
    *,
    seed: int,
    largest: int,
    max_guesses: int,
    num_train: int,
    num_val: int,
    num_sft: int,
    skill: float,
) -> None:
    """Write the three files. No two rows have the same seed."""
    first = seed * 1_000_000
    settings = {"largest": largest, "max_guesses": max_guesses}
    files = {
        "val": [prompt_row(first + i, **settings, split="val", index=i) for i in range(num_val)],
        "train": [
            prompt_row(first + num_val + i, **settings, split="train", index=i) for i in range(num_train)
        ],
        "sft": [sft_row(first + num_val + num_train + i, **settings, skill=skill) for i in range(num_sft)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")


def make_model(folder: Path, *, seed: int, num_steps: int) -> int:
    """Write the folder model: random weights, then `num_steps` of `strop sft` on the transcripts; its exit code."""
    untrained, run, model = folder / "untrained", folder / "warm-up", folder / "model"
    for old in (untrained, run, model):
        shutil.rmtree(old, ignore_errors=True)
    make_tiny_model(untrained, seed=seed)
    code = strop([
        "sft", "--config", str(CONFIG), "--out", str(run), f"model.path={untrained}", f"trainer.seed={seed}",
        f"sft.data.train_files=[{folder / 'sft.parquet'}]", f"sft.max_steps={num_steps}",
    ])  # fmt: skip
    if code == 0:
        shutil.copytree(run / "model", model)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the data and the model of the guessing example.")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/data/multi_turn_env"), help="folder to write to"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the numbers and of the model's weights")
    parser.add_argument("--largest", type=int, default=16, help="numbers are from 1 to this")
    parser.add_argument("--max-guesses", type=int, default=5, help="guesses of an episode")
    parser.add_argument("--num-train", type=int, default=512, help="rows for RL")
    parser.add_argument("--num-val", type=int, default=128, help="held-out rows")
    parser.add_argument("--num-sft", type=int, default=4000, help="transcripts for the warm-up")
    parser.add_argument("--sft-steps", type=int, default=200, help="optimizer steps of the warm-up")
    parser.add_argument(
        "--skill", type=float, default=0.5, help="share of guesses in the transcripts that follow the hints"
    )
    arguments = parser.parse_args()
    write_data(
        arguments.out, seed=arguments.seed, largest=arguments.largest, max_guesses=arguments.max_guesses,
        num_train=arguments.num_train, num_val=arguments.num_val, num_sft=arguments.num_sft, skill=arguments.skill,
    )  # fmt: skip
    return make_model(arguments.out, seed=arguments.seed, num_steps=arguments.sft_steps)


if __name__ == "__main__":
    raise SystemExit(main())
