"""Make the data and the model of the agent: those of the tool example, with rows that the agent plays.

    python examples/openai_agent/prepare.py

writes to runs/data/openai_agent: train.parquet and val.parquet (prompts for RL), sft.parquet (transcripts), and the
folder model (a Qwen3 model of 0.2 million parameters after a warm-up on the transcripts, which rarely calls a tool).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).parent.parent))
from tool_calculator import prepare as calculator

AGENT = "openai_agent"


def write_data(folder: Path, *, seed: int, num_train: int, num_val: int, num_sft: int) -> None:
    """The three files of the tool example; the prompts are for the agent of this one."""
    calculator.write_data(folder, seed=seed, num_train=num_train, num_val=num_val, num_sft=num_sft)
    for name in ("train", "val"):
        file = folder / f"{name}.parquet"
        rows = [{**row, "agent_name": AGENT} for row in pyarrow.parquet.read_table(file).to_pylist()]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the data and the model of the agent.")
    parser.add_argument("--out", type=Path, default=Path("runs/data/openai_agent"), help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="of the products, the transcripts and the model")
    parser.add_argument("--num-train", type=int, default=4000, help="prompts for RL")
    parser.add_argument("--num-val", type=int, default=200, help="held-out prompts")
    parser.add_argument("--num-sft", type=int, default=8000, help="transcripts")
    parser.add_argument("--sft-steps", type=int, default=300, help="optimizer steps of the warm-up")
    arguments = parser.parse_args()
    write_data(
        arguments.out,
        seed=arguments.seed,
        num_train=arguments.num_train,
        num_val=arguments.num_val,
        num_sft=arguments.num_sft,
    )
    return calculator.make_model(arguments.out, seed=arguments.seed, num_steps=arguments.sft_steps)


if __name__ == "__main__":
    raise SystemExit(main())
