"""Saved answers, scored again by a reward: no model is loaded, nothing is generated.

Samples come from a run folder, whose rows are found again in the data files by their number so that a reward function
gets all columns (rows of a dataset class of the user's own were saved with the samples); or from a file of JSON lines
or Parquet, one answer per row.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strop.config.sections import where_on
from strop.data import DataConfig, read_rows
from strop.data.prompts import subsample
from strop.data.rows import row_data_source, row_extra_info, row_messages, value_inside
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import Outcome, RewardConfig, RewardPool
from strop.run import RunFolder
from strop.utils.json_lines import decode
from strop.utils.sanitize import storable

RESPONSES = ("response", "solution_str", "completion", "output")
"""Columns of a file that may hold the answer, in the order in which they are looked for."""
TRUTHS = ("ground_truth", "gts", "answer", "solution")
PROMPTS = ("prompt", "input", "messages")
SCORES = ("score", "reward")
_ROW = re.compile(r".*-(\d+)")
_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class SavedSample:
    """An answer that was given before."""

    id: str
    prompt: Prompt
    response: str
    score: float | None
    """Saved score; None where there was none, or the file does not say."""
    is_scored: bool
    """True if the file says what the score was: a sample that could not be scored has none."""
    trajectory: Trajectory
    """Facts for the reward function: number of turns, facts of its agent, tokens."""
    step: int | None = None
    group: Hashable
    """Equal for answers to the same prompt, which are compared where something compares: in a run those of one visit of
    a row; of a file, those whose rows have the same prompt, ground truth, source and step."""


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """A saved sample with its new outcome."""

    sample: SavedSample
    outcome: Outcome

    @property
    def has_changed(self) -> bool:
        """The score is another one than before; False where there was nothing to compare with."""
        old, new = self.sample.score, self.outcome.score
        if old is None or new is None:
            return self.sample.is_scored and (old is None) != (new is None)
        return not math.isclose(old, new, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def rescore(samples: Sequence[SavedSample], reward: RewardConfig, *, tokenizer: str = "") -> list[Rescored]:
    """Score every sample, in order.

    Args:
        samples: with their groups.
        reward: its settings.
        tokenizer: as in `RewardPool`.

    Raises:
        RewardError: the reward cannot be loaded.
        ValueError: answers are to be compared, and rows do not say what they answer.
    """
    if reward.compares:
        _check_prompts(samples)

    async def run() -> list[Outcome]:
        async with RewardPool(reward, tokenizer=tokenizer) as pool:
            outcomes = await asyncio.gather(
                *(
                    pool.score(sample.prompt, sample.trajectory, sample.response, in_group=pool.compares)
                    for sample in samples
                )
            )
            groups = grouped(samples) if pool.compares else []
            answers = [[(samples[index].response, outcomes[index]) for index in group] for group in groups]
            prompts = [samples[group[0]].prompt for group in groups]
            trajectories = [[samples[index].trajectory for index in group] for group in groups]
            compared = await asyncio.gather(*map(pool.compare, prompts, answers, trajectories))
            for group, group_outcomes in zip(groups, compared, strict=True):
                for index, outcome in zip(group, group_outcomes, strict=True):
                    outcomes[index] = outcome
            return outcomes

    outcomes = asyncio.run(run())
    return [
        Rescored(sample=sample, outcome=outcome) for sample, outcome in zip(samples, outcomes, strict=True)
    ]


def some_of(samples: Sequence[SavedSample], limit: int, reward: RewardConfig) -> list[SavedSample]:
    """About so many samples at even distances; where answers are compared, all of some prompts.

    Raises:
        ValueError: as `rescore`.
    """
    if not reward.compares:
        return [samples[index] for index in subsample(range(len(samples)), limit)]
    _check_prompts(samples)
    groups = grouped(samples)
    chosen = subsample(range(len(groups)), max(1, limit * len(groups) // max(1, len(samples))))
    return [samples[index] for number in chosen for index in groups[number]]


def grouped(samples: Sequence[SavedSample]) -> list[list[int]]:
    """Indices of the answers to each prompt (`SavedSample.group`); one that does not say what it answers is alone."""
    groups: dict[Hashable, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group if sample.prompt.messages else index, []).append(index)
    return list(groups.values())


def _check_prompts(samples: Sequence[SavedSample]) -> None:
    """Refuse samples that a judge cannot compare.

    Raises:
        ValueError: a sample does not say what it answers.
    """
    unknown = next((sample for sample in samples if not sample.prompt.messages), None)
    if unknown is not None:
        raise ValueError(
            f"reward.judge.compare compares the answers to a prompt, and {unknown.id} does not say what it answers: "
            f"name the column {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}"
        )


def samples_of_run(
    run: RunFolder, data: DataConfig, *, split: Literal["train", "val"], steps: Sequence[int]
) -> list[SavedSample]:
    """The samples of some steps of a run, with the rows that they answer.

    Args:
        run: folder.
        data: its data settings.
        split: train or val.
        steps: at least one.

    Raises:
        ValueError, FileNotFoundError: a data file is gone, or has fewer rows than the run saw.
    """
    files = data.train_files if split == "train" else data.val_files
    has_files = where_on(data.dataset_class) is None
    rows = read_rows(files, data.cache_dir) if has_files else []
    saved = [row for step in steps for row in run.samples.read(step, split=split)]
    return [_of_run(row, rows, data, split) for row in saved if row.get("response") is not None]


def _of_run(
    saved: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], data: DataConfig, split: str
) -> SavedSample:
    match = _ROW.fullmatch(saved["uid"])
    number = int(match[1]) if match else 0
    source: Mapping[str, Any] = {}
    if rows:
        if number >= len(rows):
            raise ValueError(
                f"sample {saved['id']} answers {split} row {number}, but the data files have only {len(rows)} rows: "
                f"restore the files that the run was trained with"
            )
        source = rows[number]
    where = f"{split} row {number}"
    dataset_row = decode(saved["dataset_row"].encode())[0] if saved.get("dataset_row") else {}
    prompt = Prompt(
        uid=saved["uid"],
        row=number,
        token_ids=tuple(saved.get("prompt_ids") or (0,)),
        messages=row_messages(source, data, where)
        if source
        else _as_messages(dataset_row.get("messages") or saved.get("prompt")),
        data_source=saved["data_source"] or "",
        ground_truth=value_inside(source, data.ground_truth_key) if source else saved.get("ground_truth"),
        extra_info=row_extra_info(source, where) if source else dataset_row.get("extra_info", {}),
        columns=_columns(source, data) if source else dataset_row.get("columns", {}),
    )
    trajectory = Trajectory(
        uid=prompt.uid, sample_index=0, prompt_ids=prompt.token_ids, num_turns=saved.get("num_turns") or 2,
        extra=saved.get("agent_facts") or {},
    ).with_given(saved.get("response_ids") or ())  # fmt: skip
    return SavedSample(
        id=saved["id"], prompt=prompt, response=saved["response"], trajectory=trajectory, score=saved.get("score"),
        is_scored=saved.get("outcome") is not None, step=saved.get("step"), group=(saved.get("step"), saved["uid"]),
    )  # fmt: skip


def samples_of_file(path: Path, data: DataConfig) -> list[SavedSample]:
    """The rows of a JSON-lines or Parquet file.

    Columns: the answer (response, solution_str, completion or output); data_source; the ground truth (as data.
    ground_truth_key says, else ground_truth, gts, answer or solution); and, where they are there, prompt, extra_info,
    score or reward, id or uid, step. All columns reach a reward function of TRL's kind.

    Raises:
        ValueError: a row has no answer, or no data source where data.default_data_source is empty.
    """
    rows = read_rows([path])
    return [_of_file(row, number, data) for number, row in enumerate(rows)]


def _of_file(row: Mapping[str, Any], number: int, data: DataConfig) -> SavedSample:
    response = _first(row, RESPONSES)
    if isinstance(response, (list, tuple)) and response and isinstance(response[-1], Mapping):
        response = response[-1].get("content")
    if not isinstance(response, str):
        raise ValueError(
            f"row {number} has no answer as text: name the column {', '.join(RESPONSES[:-1])} or {RESPONSES[-1]}; "
            f"columns found: {', '.join(row)}"
        )
    prompt = prompt_of_row(row, number, data)
    score, name = _first(row, SCORES), prompt.uid
    is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
    step = row.get("step")
    bare = Trajectory(uid=name, sample_index=0, prompt_ids=prompt.token_ids)
    return SavedSample(
        id=name, prompt=prompt, response=response, trajectory=bare, score=float(score) if is_number else None,
        is_scored=is_number, step=step if isinstance(step, int) else None,
        group=json.dumps(storable([step, prompt.messages, prompt.ground_truth, prompt.data_source]), sort_keys=True),
    )  # fmt: skip


def prompt_of_row(row: Mapping[str, Any], number: int, data: DataConfig) -> Prompt:
    """A row of a file as a reward is told of it, without tokens; columns as in `samples_of_file`."""
    truth = value_inside(row, data.ground_truth_key)
    return Prompt(
        uid=str(_first(row, ("id", "uid")) or f"row {number}"), row=number, token_ids=(0,),
        messages=_as_messages(_first(row, PROMPTS)), data_source=row_data_source(row, data),
        ground_truth=_first(row, TRUTHS) if truth is None else truth,
        extra_info=row_extra_info(row, f"row {number}"), columns=_columns(row, data),
    )  # fmt: skip


def _columns(row: Mapping[str, Any], data: DataConfig) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.items()
        if name not in (data.data_source_key, "extra_info", "reward_model")
    }


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _as_messages(prompt: object) -> tuple[Mapping[str, Any], ...]:
    if isinstance(prompt, (list, tuple)) and all(isinstance(message, Mapping) for message in prompt):
        return tuple(prompt)
    return () if prompt is None else ({"role": "user", "content": str(prompt)},)
