"""Make the arithmetic example: sums as chat messages, and a small model to train on them.

    python examples/arithmetic/prepare.py

writes to runs/data/arithmetic: train.parquet and val.parquet (prompts for RL), sft.parquet (solved sums for
the warm-up), and the folder model (a Qwen3 model of 0.6 million parameters with random weights).
"""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from strop.data.tiny_model import make_tiny_model

DATA_SOURCE = "arithmetic"
HELD_OUT_SHARE = 8
"""One sum in this many is held out for validation."""


def question(a: int, b: int) -> list[dict[str, str]]:
    """The prompt: one user message."""
    return [{"role": "user", "content": f"{a} + {b} = ?"}]


def prompt_row(a: int, b: int, *, split: str, index: int) -> dict[str, Any]:
    """One RL row in verl's schema."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": question(a, b),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index},
    }


def sft_row(a: int, b: int) -> dict[str, Any]:
    """One row for the warm-up: the question and its answer."""
    return {"messages": [*question(a, b), {"role": "assistant", "content": str(a + b)}]}


def write_data(folder: Path, *, seed: int, largest: int) -> dict[str, int]:
    """Write the three files; returns the number of rows in each. No held-out sum is in the other two."""
    sums = list(itertools.product(range(largest + 1), repeat=2))
    random.Random(seed).shuffle(sums)
    num_val = max(1, len(sums) // HELD_OUT_SHARE)
    val, train = sums[:num_val], sums[num_val:]
    files = {
        "train": [prompt_row(a, b, split="train", index=index) for index, (a, b) in enumerate(train)],
        "val": [prompt_row(a, b, split="val", index=index) for index, (a, b) in enumerate(val)],
        "sft": [sft_row(a, b) for a, b in train],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    return {name: len(rows) for name, rows in files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the data and the model of the arithmetic example.")
    parser.add_argument("--out", type=Path, default=Path("runs/data/arithmetic"), help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of the model's weights")
    parser.add_argument("--largest", type=int, default=19, help="largest number in a sum")
    arguments = parser.parse_args()
    if arguments.largest < 1:
        parser.error(f"--largest is {arguments.largest}; use at least 1")
    counts = write_data(arguments.out, seed=arguments.seed, largest=arguments.largest)
    make_tiny_model(arguments.out / "model", seed=arguments.seed)
    print(f"{arguments.out}: {counts['train']} training prompts, {counts['val']} held out, a small model")


if __name__ == "__main__":
    main()
