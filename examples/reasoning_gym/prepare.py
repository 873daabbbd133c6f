"""Make prompts from any task of the reasoning-gym package.

    python examples/reasoning_gym/prepare.py spell_backward --set max_word_len=5 --tiny-model
    python examples/reasoning_gym/prepare.py --list

writes to runs/data/<task>: train.parquet and val.parquet (prompts for RL, scored by the task's own
score_answer), sft.parquet (solved tasks), and with --tiny-model the folder model.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import reasoning_gym
from reasoning_gym.factory import DATASETS

from strop.data.tiny import make_tiny_model

TAG_INSTRUCTION = "\nGive the final answer between <answer> and </answer>."


def make_entries(task: str, count: int, *, seed: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entries with different questions, in the order in which the package makes them.

    Raises:
        ValueError: the package has no such task or option, or an entry cannot be kept as JSON.
    """
    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}; see the names with --list")
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=2 * count, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym refuses the options {dict(options)} of {task}: {error}") from error
    entries: dict[str, dict[str, Any]] = {}
    for entry in dataset:
        if len(entries) == count:
            break
        if entry["question"] not in entries:
            entries[entry["question"]] = keep_as_json(task, entry, dataset.score_answer)
    return list(entries.values())


def keep_as_json(task: str, entry: dict[str, Any], score_answer: Any) -> dict[str, Any]:
    """The entry as it comes back from JSON text; the task must still score its own answer the same.

    Raises:
        ValueError: it does not, because the task keeps data that JSON has no form for.
    """
    try:
        kept: dict[str, Any] = json.loads(json.dumps(entry, default=lambda value: value.tolist()))
        same = math.isclose(
            score_answer(answer=entry["answer"], entry=entry),
            score_answer(answer=entry["answer"], entry=kept),
        )
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(
            f"entries of {task} cannot be kept as JSON: {type(error).__name__}: {error}"
        ) from error
    if not same:
        raise ValueError(
            f"entries of {task} cannot be kept as JSON: the task scores its own answer differently"
        )
    return kept


def prompt_row(
    task: str, entry: Mapping[str, Any], *, instruction: str, split: str, index: int
) -> dict[str, Any]:
    """One RL row in verl's schema; the scorer finds the entry in extra_info."""
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "user", "content": entry["question"] + instruction}],
        "ability": "reasoning",
        "reward_model": {
            "style": "rule",
            "ground_truth": "" if entry["answer"] is None else str(entry["answer"]),
        },
        "extra_info": {"split": split, "index": index, "reasoning_gym": json.dumps(entry)},
    }


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
