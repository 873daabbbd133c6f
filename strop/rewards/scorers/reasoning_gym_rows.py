"""Rows of tasks of the reasoning-gym package, which their own scorer takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from strop.rewards.scorers.reasoning_gym import KEY, PREFIX

TAG_INSTRUCTION = "\nGive the final answer between <answer> and </answer>."
SET_SIZE, SET_SEED = 200, 20_251_124
"""Of `strop eval --data reasoning_gym/TASK`: the same entries every time, and not those of a training with seed 0."""


def rows_of_set(name: str, source: str) -> list[dict[str, Any]]:
    """The entries of a task that it is evaluated on.

    Args:
        name: reasoning_gym/TASK.
        source: empty, since the package makes them; or how many.

    Raises:
        ValueError: there is no such task or package, or another source.
    """
    if source and not source.isdecimal():
        raise ValueError(
            f"--data {name}={source}: the package makes these entries; give their number, for example {name}=500"
        )
    task = name.removeprefix(PREFIX)
    entries = make_entries(task, int(source or SET_SIZE), seed=SET_SEED, options={})
    return [
        prompt_row(task, entry, instruction=TAG_INSTRUCTION, split="test", index=index)
        for index, entry in enumerate(entries)
    ]


def make_entries(task: str, count: int, *, seed: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entries with different questions, in the order in which the package makes them.

    Raises:
        ValueError: the package has no such task or option, or an entry cannot be kept as JSON.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset  # loads a hundred task modules
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the tasks {PREFIX}{task} need the reasoning-gym package: pip install 'strop[reasoning-gym]'"
        ) from error
    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}; known: {', '.join(sorted(DATASETS))}")
    try:
        dataset = create_dataset(task, seed=seed, size=2 * count, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym refuses the options {dict(options)} of {task}: {error}") from error
    entries: dict[str, dict[str, Any]] = {}
    for entry in dataset:
        if len(entries) == count:
            break
        if entry["question"] not in entries:
            entries[entry["question"]] = _keep_as_json(task, entry, dataset.score_answer)
    return list(entries.values())


def _keep_as_json(task: str, entry: dict[str, Any], score_answer: Any) -> dict[str, Any]:
    """The entry as it comes back from JSON text; the task must still score its own answer the same.

    Raises:
        ValueError: it does not, because the task keeps data that JSON has no form for.
    """
    try:
        restored: dict[str, Any] = json.loads(json.dumps(entry, default=lambda value: value.tolist()))
        same = math.isclose(
            score_answer(answer=entry["answer"], entry=entry),
            score_answer(answer=entry["answer"], entry=restored),
        )
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(
            f"entries of {task} cannot be kept as JSON: {type(error).__name__}: {error}"
        ) from error
    if not same:
        raise ValueError(
            f"entries of {task} cannot be kept as JSON: the task scores its own answer differently"
        )
    return restored


def prompt_row(
    task: str, entry: Mapping[str, Any], *, instruction: str, split: str, index: int
) -> dict[str, Any]:
    """One RL row in verl's schema; the scorer finds the entry in extra_info."""
    return {
        "data_source": f"{PREFIX}{task}",
        "prompt": [{"role": "user", "content": entry["question"] + instruction}],
        "ability": "reasoning",
        "reward_model": {
            "style": "rule",
            "ground_truth": "" if entry["answer"] is None else str(entry["answer"]),
        },
        "extra_info": {"split": split, "index": index, KEY: json.dumps(entry)},
    }
