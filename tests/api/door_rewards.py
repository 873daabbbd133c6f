"""A reward function in a file of its own, which processes that score import: without torch, in no time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BONUS = 0.25


def first_letter(completions: Sequence[Any], **columns: Any) -> list[float]:
    """By the first letter; refers to a value of its module, as functions of notebooks do."""
    return [ord((one[0]["content"] or " ")[0]) % 8 / 10 + BONUS for one in completions]
