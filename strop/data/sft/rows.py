"""Rows of a fine-tuning from files and run folders, and rejection sampling.

A run folder gives its training samples: the tokens themselves, with the score of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.data.bad_rows import BadRows
from strop.data.mixture import entry_names
from strop.data.readers import check_entries, read_rows
from strop.data.sft.config import SftDataConfig
from strop.run import RunError, is_run
from strop.run.samples import SampleStore
from strop.run.samples.selection import select_samples
from strop.utils.sanitize import as_number


@dataclass(frozen=True, kw_only=True)
class SftRows:
    """Rows in the order of the files."""

    rows: list[dict[str, Any]]
    sources: list[str]
    """Of each row: its column `data_source`, else the name of the entry that it is from."""


def read_sft_rows(files: Sequence[str], cache_dir: str | Path = "") -> SftRows:
    """All rows of the entries; of a run folder the training samples that have an answer.

    Raises:
        ValueError, FileNotFoundError: as `read_rows`.
        RunError: a run folder has no samples, or damaged ones.
    """
    check_entries(files)
    names = entry_names(files)
    rows: list[dict[str, Any]] = []
    sources: list[str] = []
    for entry in files:
        entry_rows = _samples(Path(entry)) if is_run(entry) else read_rows([entry], cache_dir)
        rows += entry_rows
        sources += [str(row.get("data_source") or names[entry]) for row in entry_rows]
    return SftRows(rows=rows, sources=sources)


def _samples(folder: Path) -> list[dict[str, Any]]:
    samples = [
        row for row in SampleStore(folder / "samples").read() if row["response_ids"] and row["prompt_ids"]
    ]
    if not samples:
        raise RunError(
            f"{folder} holds no training samples to fine-tune on: give the folder of a run of `strop train` with "
            f"run.save_samples=true"
        )
    return samples


def chosen_rows(rows: Sequence[Mapping[str, Any]], config: SftDataConfig, *, split: str) -> list[int]:
    """Numbers of the rows that are imitated, in ascending order: all, or those that `config.keep` keeps.

    Without `keep.repeats` an answer that a prompt has several times counts once, with its largest score.

    Raises:
        ValueError: a row has no score, or no prompt.
    """
    keep = config.keep
    if not keep.is_on:
        return list(range(len(rows)))
    scores: list[float] = []
    texts: list[tuple[str, str]] = []
    bad = BadRows(split, len(rows), files=f"sft.data.{split}_files")
    for number, row in enumerate(rows):
        where = f"{split} row {number}"
        with bad.reading(where):
            scores.append(_score(row, where))
            texts.append(_prompt_and_answer(row, config, where))
    bad.check()
    numbers = list(range(len(rows)))
    if not keep.repeats:
        best: dict[tuple[str, str], int] = {}
        for number, text in enumerate(texts):
            before = best.setdefault(text, number)
            if scores[number] > scores[before] or math.isnan(scores[before]):
                best[text] = number
        numbers = sorted(best.values())
    kept_numbers = select_samples(
        [scores[number] for number in numbers],
        [texts[number][0] for number in numbers],
        best=keep.best,
        min_score=keep.min_score,
    )
    if not kept_numbers:
        finite_scores = [score for score in scores if math.isfinite(score)]
        highest = f"the highest score is {max(finite_scores):g}" if finite_scores else "no row was scored"
        raise ValueError(
            f"no {split} row is kept: sft.data.keep.min_score is {keep.min_score} and {highest}; lower it, or use "
            f"other rows"
        )
    return [numbers[number] for number in kept_numbers]


def _score(row: Mapping[str, Any], where: str) -> float:
    """The score of a row; NaN where it was not scored."""
    if "score" not in row:
        raise ValueError(
            f"{where} has no column 'score', by which sft.data.keep chooses; columns found: {', '.join(row)}. Rows "
            f"with one are written by `strop eval --out`, and a run folder has them"
        )
    value = row["score"]
    number = math.nan if value is None else as_number(value)
    if math.isnan(number) and value is not None and value != "nan" and not isinstance(value, float):
        raise ValueError(f"{where} has the score {value!r:.40}, which is no number; write one, or null")
    return number


def _prompt_and_answer(row: Mapping[str, Any], config: SftDataConfig, where: str) -> tuple[str, str]:
    """Prompt and answer of a row, as text to compare."""
    if has_tokens(row):
        first = (row.get("earlier_sequences") or [row])[0]
        return repr(list(first["prompt_ids"])), repr(list(row["response_ids"]))
    if (messages := row.get(config.messages_key)) is not None:
        return repr(messages[:-1]), repr(messages[-1:])
    prompt, completion = row.get(config.prompt_key), row.get(config.completion_key)
    if prompt is None or completion is None:
        raise ValueError(
            f"{where} has neither tokens (prompt_ids, response_ids), nor {config.messages_key!r}, nor both "
            f"{config.prompt_key!r} and {config.completion_key!r}; columns found: {', '.join(row)}"
        )
    return repr(prompt), repr(completion)


def has_tokens(row: Mapping[str, Any]) -> bool:
    """True if the row holds the tokens themselves."""
    return row.get("prompt_ids") is not None and row.get("response_ids") is not None
