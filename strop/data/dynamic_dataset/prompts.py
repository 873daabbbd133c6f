"""Training prompts to which rows are added while a run goes on."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.data.config import DataConfig
from strop.data.prompts import PromptDataset
from strop.protocol.trajectory import Prompt

_NO_LIMIT = 2**31 - 1


class GrowingPrompts:
    """The prompts of files, and those of rows that came later, which have the numbers after them.

    Args:
        first: the rows of the files.
        tokenizer: as of `first`.
        config: column names and limits; data.max_train_prompts counts rows of files alone.
        prepare: applied to rows before, such as naming their agents.
    """

    def __init__(
        self,
        first: PromptDataset,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        prepare: Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]],
    ) -> None:
        self._parts, self._starts = [first], [0]
        self._tokenizer, self._prepare = tokenizer, prepare
        self._limit, self._is_filtered = config.max_prompt_tokens, config.filter_overlong_prompts
        longest = _NO_LIMIT if self._is_filtered else config.max_prompt_tokens
        self._config = dataclasses.replace(config, max_prompt_tokens=longest, max_train_prompts=None)
        self._num_rows = first.num_rows

    @property
    def num_rows(self) -> int:
        """Rows so far, also those that were dropped: the number of the next one."""
        return self._num_rows

    @property
    def row_numbers(self) -> tuple[int, ...]:
        """Rows that are kept, as of `PromptDataset`."""
        return tuple(
            start + row
            for start, part in zip(self._starts, self._parts, strict=True)
            for row in part.row_numbers
            if not start or not self._is_too_long(part, row)
        )

    @property
    def has_media(self) -> bool:
        """A row has images or videos."""
        return any(part.has_media for part in self._parts)

    def __len__(self) -> int:
        return len(self.row_numbers)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        """Add rows; the numbers of those that are kept.

        Raises:
            ValueError: one cannot be a prompt; the sentence names it.
        """
        if not rows:
            return []
        start = self._num_rows
        part = PromptDataset(self._prepare(rows), self._tokenizer, self._config, "train", first_row=start)
        self._parts.append(part)
        self._starts.append(start)
        self._num_rows += len(rows)
        return [start + row for row in part.row_numbers if not self._is_too_long(part, row)]

    def prompt(self, row: int, uid: str) -> Prompt:
        """The prompt of a row number, as the visit `uid`.

        Raises:
            KeyError: the row does not exist or was dropped.
        """
        at = bisect.bisect_right(self._starts, row) - 1
        return dataclasses.replace(self._parts[at].prompt(row - self._starts[at], uid), row=row)

    def skip_reason(self, prompt: Prompt) -> str:
        """Empty: prompts that are too long are not among these."""
        return ""

    def report(self) -> str:
        """One line: of the files, and how many rows came later."""
        line = self._parts[0].report()
        added = self._num_rows - self._parts[0].num_rows
        return f"{line}; {added} rows came later" if added else line

    def _is_too_long(self, part: PromptDataset, row: int) -> bool:
        return self._is_filtered and part.num_tokens(row) > self._limit
