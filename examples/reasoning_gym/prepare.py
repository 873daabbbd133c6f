"""Make prompts from any task of the reasoning-gym package.

    python examples/reasoning_gym/prepare.py spell_backward --set max_word_len=5 --tiny-model
    python examples/reasoning_gym/prepare.py --list

writes to runs/data/<task>: train.parquet and val.parquet (prompts for RL, scored by the task's own
score_answer), sft.parquet (solved tasks), and with --tiny-model the folder model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from reasoning_gym.factory import DATASETS

from strop.data.tiny_model import make_tiny_model
from strop.rewards.scorers.reasoning_gym_rows import TAG_INSTRUCTION, make_entries, prompt_row


def sft_row(entry: Mapping[str, Any], *, instruction: str) -> dict[str, Any]:
    """One solved task; the answer stands in tags when the instruction asks for them."""
    answer = f"<answer>{entry['answer']}</answer>" if "<answer>" in instruction else str(entry["answer"])
    return {
        "messages": [
            {"role": "user", "content": entry["question"] + instruction},
            {"role": "assistant", "content": answer},
        ]
    }


def write_data(
    folder: Path,
    entries: Sequence[Mapping[str, Any]],
    *,
    task: str,
    num_val: int,
    num_sft: int,
    instruction: str,
) -> dict[str, int]:
    """Write the three files from different entries; returns the number of rows in each."""
    val, sft, train = entries[:num_val], entries[num_val : num_val + num_sft], entries[num_val + num_sft :]
    files = {
        "train": [
            prompt_row(task, entry, instruction=instruction, split="train", index=index)
            for index, entry in enumerate(train)
        ],
        "val": [
            prompt_row(task, entry, instruction=instruction, split="val", index=index)
            for index, entry in enumerate(val)
        ],
        "sft": [sft_row(entry, instruction=instruction) for entry in sft if entry["answer"] is not None],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        if rows:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    return {name: len(rows) for name, rows in files.items()}


def parse_option(text: str) -> tuple[str, Any]:
    """`max_word_len=5` as a name and a value; the value is JSON, or text when it is not."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} has no '='; write --set name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Make RL prompts from a task of the reasoning-gym package.")
    parser.add_argument("task", nargs="?", help="name of the task, for example spell_backward")
    parser.add_argument("--list", action="store_true", help="print the names of all tasks")
    parser.add_argument("--out", type=Path, help="folder to write to (default: runs/data/<task>)")
    parser.add_argument("--num-train", type=int, default=2000, help="prompts for training")
    parser.add_argument("--num-val", type=int, default=128, help="held-out prompts")
    parser.add_argument("--num-sft", type=int, default=500, help="solved tasks for a warm-up")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks and of the tiny model's weights")
    parser.add_argument(
        "--set", type=parse_option, action="append", default=[], metavar="NAME=VALUE", dest="options",
        help="an option of the task, for example max_word_len=5; may be repeated",
    )  # fmt: skip
    parser.add_argument("--tags", action="store_true", help="ask for the answer between <answer> tags")
    parser.add_argument("--tiny-model", action="store_true", help="also make a small model to train")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.list:
        print("\n".join(sorted(DATASETS)))
        return
    if not arguments.task:
        parser.error("name a task, for example spell_backward, or use --list")
    wanted = arguments.num_val + arguments.num_sft + arguments.num_train
    try:
        entries = make_entries(arguments.task, wanted, seed=arguments.seed, options=dict(arguments.options))
    except ValueError as error:
        parser.error(str(error))
    if len(entries) <= arguments.num_val + arguments.num_sft:
        parser.error(
            f"{arguments.task} with these options has only {len(entries)} different questions among "
            f"{2 * wanted}; lower --num-val and --num-sft, or widen the task with --set"
        )
    out = arguments.out or Path("runs/data") / arguments.task
    counts = write_data(
        out, entries, task=arguments.task, num_val=arguments.num_val, num_sft=arguments.num_sft,
        instruction=TAG_INSTRUCTION if arguments.tags else "",
    )  # fmt: skip
    if arguments.tiny_model:
        make_tiny_model(out / "model", seed=arguments.seed)
    print(f"{out}: {counts['train']} training prompts, {counts['val']} held out, {counts['sft']} solved")


if __name__ == "__main__":
    main()
