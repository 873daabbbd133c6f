"""Make the example of preferences: comparisons of sums, and a small model that was shown some sums.

    python examples/dpo/prepare.py

writes to runs/data/preferences: pairs.parquet and val_pairs.parquet (a question, the right answer and a wrong one),
sft.parquet (solved sums), and the folder model (a Qwen3 model of 0.6 million parameters with random weights).
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

HELD_OUT_SHARE = 8
"""One sum in this many is held out for validation."""
PAIRS_PER_SUM = 4
LARGEST_ANSWER = 40


def question(a: int, b: int) -> list[dict[str, str]]:
    """The prompt: one user message."""
    return [{"role": "user", "content": f"{a} + {b} = ?"}]


def answer(number: int) -> list[dict[str, str]]:
    """What the model is to say, or not."""
    return [{"role": "assistant", "content": str(number)}]


def pairs(a: int, b: int, draw: random.Random) -> list[dict[str, Any]]:
    """Comparisons of the sum with a few other numbers."""
    wrong = draw.sample([number for number in range(LARGEST_ANSWER) if number != a + b], PAIRS_PER_SUM)
    return [{"prompt": question(a, b), "chosen": answer(a + b), "rejected": answer(one)} for one in wrong]


def write_data(folder: Path, *, seed: int, largest: int) -> dict[str, int]:
    """Write the three files; returns the number of rows in each. No held-out sum is in the other two."""
    draw = random.Random(seed)
    sums = list(itertools.product(range(largest + 1), repeat=2))
    draw.shuffle(sums)
    num_val = max(1, len(sums) // HELD_OUT_SHARE)
    val, train = sums[:num_val], sums[num_val:]
    files = {
        "pairs": [one for a, b in train for one in pairs(a, b, draw)],
        "val_pairs": [one for a, b in val for one in pairs(a, b, draw)],
        "sft": [{"messages": [*question(a, b), *answer(a + b)]} for a, b in train],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    return {name: len(rows) for name, rows in files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make the data and the model of the examples on preferences."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/data/preferences"), help="folder to write to")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the split, the wrong answers and the model's weights"
    )
    parser.add_argument("--largest", type=int, default=19, help="largest number in a sum")
    arguments = parser.parse_args()
    if not 1 <= arguments.largest <= LARGEST_ANSWER // 2:
        parser.error(f"--largest is {arguments.largest}; use 1 to {LARGEST_ANSWER // 2}")
    counts = write_data(arguments.out, seed=arguments.seed, largest=arguments.largest)
    make_tiny_model(arguments.out / "model", seed=arguments.seed)
    print(f"{arguments.out}: {counts['pairs']} comparisons, {counts['val_pairs']} held out, a small model")


if __name__ == "__main__":
    main()
