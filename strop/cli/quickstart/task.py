"""A verifiable task made on the spot: write a word backwards.

    user: reverse: stop
    assistant: pots

The rows are in verl's schema. A person sees at a glance whether an answer is right, and so does an exact
match. Palindromes are left out: there, copying the word would be right.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from strop.utils.rng import random_key, uniforms

DATA_SOURCE = "strop/exact"
"""Scored 1 when the stripped answer equals the ground truth, else 0."""
ALPHABET = string.ascii_lowercase
"""With all 26 letters the pass rate of SFT rises slowly enough to stop it half-way; with ten it jumps from
14 % to 93 % within twenty steps of the tiny model (learning rate 2e-3, 32 rows a step)."""
_DRAWS_PER_BLOCK = 4096


@dataclass(frozen=True, kw_only=True)
class TaskFiles:
    """Files that a task was written to."""

    train: Path
    """Prompts for RL."""
    val: Path
    """Held-out prompts."""
    sft: Path
    """Solved examples as chat messages."""
    sft_val: Path
    """The held-out prompts, solved likewise."""


def write_task(
    folder: Path,
    *,
    seed: int,
    num_train: int,
    num_val: int,
    num_sft: int,
    min_letters: int = 4,
    max_letters: int = 4,
    alphabet: str = ALPHABET,
) -> TaskFiles:
    """Write train.parquet, val.parquet, sft.parquet and sft_val.parquet: the words are a pure function of the seed.

    No word is in two of the first three files, or twice in one; sft_val.parquet has the words of val.parquet.

    Args:
        folder: made when it does not exist.
        seed: of the words.
        num_train: rows for RL; num_val: held-out rows; num_sft: solved rows.
        min_letters: letters of the shortest words; max_letters: of the longest.
        alphabet: letters that words are made of, each once.

    Raises:
        ValueError: there are not that many words, or the alphabet repeats a letter.
    """
    words = draw_words(
        seed,
        num_val + num_train + num_sft,
        min_letters=min_letters,
        max_letters=max_letters,
        alphabet=alphabet,
    )
    val, rest = words[:num_val], words[num_val:]  # first: the same held-out words for any size of the others
    names = ("train", "val", "sft", "sft_val")
    files = TaskFiles(**{name: folder / f"{name}.parquet" for name in names})
    folder.mkdir(parents=True, exist_ok=True)
    _write(files.val, [prompt_row(word, split="val", index=index) for index, word in enumerate(val)])
    _write(files.train, [prompt_row(word, split="train", index=i) for i, word in enumerate(rest[:num_train])])
    _write(files.sft, [sft_row(word) for word in rest[num_train:]])
    _write(files.sft_val, [sft_row(word) for word in val])
    return files


def prompt_row(word: str, *, split: str, index: int) -> dict[str, Any]:
    """One RL row: the word to reverse, and the reversed word as ground truth."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question(word)}],
        "ability": "reversal",
        "reward_model": {"style": "rule", "ground_truth": word[::-1]},
        "extra_info": {"split": split, "index": index},
    }


def sft_row(word: str) -> dict[str, Any]:
    """One SFT row: the question and its answer."""
    return {
        "messages": [
            {"role": "user", "content": question(word)},
            {"role": "assistant", "content": word[::-1]},
        ]
    }


def question(word: str) -> str:
    """User message for a word."""
    return f"reverse: {word}"


def draw_words(seed: int, count: int, *, min_letters: int, max_letters: int, alphabet: str) -> list[str]:
    """Different words that are no palindromes, in random order; a longer draw begins like a shorter one.

    Each length from `min_letters` to `max_letters` is equally likely until its words are used up.
    """
    _check_words(count, min_letters, max_letters, alphabet)
    words: dict[str, None] = {}
    keys = np.array(random_key(seed, "task_words", min_letters, max_letters, alphabet), dtype=np.uint64)
    columns = max_letters + 1  # the first number of a row draws the length
    start = 0
    while len(words) < count:
        positions = np.arange(start, start + _DRAWS_PER_BLOCK * columns, dtype=np.int64)
        numbers = uniforms(keys, positions).reshape(_DRAWS_PER_BLOCK, columns)
        lengths = min_letters + (numbers[:, 0] * (max_letters - min_letters + 1)).astype(np.int64)
        letters = (numbers[:, 1:] * len(alphabet)).astype(np.int64)
        for row, length in zip(letters, lengths, strict=True):
            word = "".join(alphabet[number] for number in row[:length])
            if word != word[::-1] and len(words) < count:
                words[word] = None
        start += _DRAWS_PER_BLOCK * columns
    return list(words)


def _check_words(count: int, min_letters: int, max_letters: int, alphabet: str) -> None:
    """Raise a ValueError unless there are `count` such words."""
    size = len(alphabet)
    if not 2 <= min_letters <= max_letters or size < 2 or len(set(alphabet)) != size:
        raise ValueError(
            f"words need 2 letters or more, and an alphabet of at least 2 different ones, got {min_letters} "
            f"to {max_letters} letters of {alphabet!r}"
        )
    lengths = range(min_letters, max_letters + 1)
    num_words = sum(
        size**length - size ** ((length + 1) // 2) for length in lengths
    )  # without the palindromes
    if count > num_words:
        raise ValueError(
            f"{count} different words were asked for, but {min_letters} to {max_letters} letters of "
            f"{alphabet!r} make {num_words} that are no palindromes; ask for fewer rows or for more letters"
        )


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
