"""Well-known sets to evaluate on, by name: their published sources, and their rows."""

from __future__ import annotations

from strop.data.prepare import Row, prepare_rows
from strop.data.readers import read_rows

PUBLISHED = {
    "gsm8k": "hub:openai/gsm8k:main@test",
    "math500": "hub:HuggingFaceH4/MATH-500@test",
    "aime24": "hub:HuggingFaceH4/aime_2024@train",
    "aime25": "hub:math-ai/aime25@test",
}


def rows_of_set(name: str, source: str) -> list[Row]:
    """The rows of a set.

    Args:
        name: of PUBLISHED.
        source: a copy of its raw rows, as an entry of data.val_files; empty: the published ones.

    Raises:
        ValueError, FileNotFoundError: they cannot be read, or are not as published.
    """
    try:
        raw = read_rows([source or PUBLISHED[name]])
    except ValueError as error:
        if source:
            raise
        raise ValueError(
            f"{error}. Then --data {name}=FILE reads your copy, with its columns as they are"
        ) from error
    return prepare_rows(name, raw, split="test").rows
