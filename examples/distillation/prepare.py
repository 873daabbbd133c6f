"""Make the example of offline distillation: words to write backwards, a model for the teacher and a smaller one.

    python examples/distillation/prepare.py

writes to runs/data/distillation: sft.parquet (solved words, which the teacher alone sees), train.parquet (words that
the teacher is asked), val.parquet (held-out words), and the folders teacher (a Qwen3 model of 0.6 million parameters)
and student (one of 0.1 million), both with random weights and the same tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from strop.cli.quickstart.task import TaskFiles, write_task
from strop.data.tiny_model import make_tiny_model

NUM_SOLVED, NUM_ASKED, NUM_HELD_OUT = 2000, 1000, 200


def write_all(
    folder: Path, *, seed: int, solved: int = NUM_SOLVED, asked: int = NUM_ASKED, held_out: int = NUM_HELD_OUT
) -> TaskFiles:
    """Write the data and both models; no word is in two of the files."""
    make_tiny_model(folder / "teacher", seed=seed)
    make_tiny_model(
        folder / "student", seed=seed, hidden_size=64, num_layers=2, head_dim=16, intermediate_size=192
    )
    return write_task(folder, seed=seed, num_train=asked, num_val=held_out, num_sft=solved)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make the data and the models of the example of distillation."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/data/distillation"), help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="of the words and of the weights")
    arguments = parser.parse_args()
    write_all(arguments.out, seed=arguments.seed)
    print(
        f"{arguments.out}: {NUM_SOLVED} solved words, {NUM_ASKED} to ask the teacher, {NUM_HELD_OUT} held out, 2 models"
    )


if __name__ == "__main__":
    main()
