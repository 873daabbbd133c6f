"""Training prompts that are read and encoded when they are visited.

Nothing is known about a row before its visit, so a prompt that is too long shows then. With
data.filter_overlong_prompts it is passed over and the next visit of the order takes its place: a step has as many
prompts as without, and what is visited depends on seed, files and limits alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.data.chat import require_chat_template
from strop.data.config import DataConfig
from strop.data.prompts import PromptDataset, subsample
from strop.data.visit_ids import visit_uid
from strop.protocol.trajectory import Prompt

_NO_LIMIT = 2**31 - 1
_NUM_TRIED = 32
"""Rows that are read before a run, at even distances, so that a wrong mapping ends it at once."""


class StreamedPrompts:
    """The training prompts of rows that are read by number, such as `StoredRows`.

    Args:
        rows: read at each visit; not held.
        tokenizer: with a chat template.
        config: column names and limits; data.max_train_prompts keeps rows at even distances, of all rows.
        prepare: applied to a row before, such as naming its agent; its second argument names the row in errors.

    Raises:
        ValueError: the tokenizer has no chat template, or one of a few rows that are tried cannot be a prompt.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        *,
        prepare: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda row, where: row,
    ) -> None:
        require_chat_template(tokenizer)
        if not rows:
            raise ValueError("train data has no rows; check data.train_files")
        self._rows, self._prepare = rows, prepare
        self._tokenizer = tokenizer
        self._limit = config.max_prompt_tokens
        self._is_filtered = config.filter_overlong_prompts
        longest = _NO_LIMIT if self._is_filtered else config.max_prompt_tokens
        self._config = dataclasses.replace(config, max_prompt_tokens=longest, max_train_prompts=None)
        self._numbers: Sequence[int] = range(len(rows))
        if config.max_train_prompts is not None:
            self._numbers = subsample(self._numbers, config.max_train_prompts)
        tried = [self.prompt(row, visit_uid(0, row)) for row in subsample(self._numbers, _NUM_TRIED)]
        self._num_tried = len(tried)
        self._has_media = any(prompt.media for prompt in tried)
        self._num_too_long = sum(bool(self.skip_reason(prompt)) for prompt in tried)

    @property
    def row_numbers(self) -> Sequence[int]:
        """Every row, whether or not its prompt is too long."""
        return self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def has_media(self) -> bool:
        """A row that was tried has images or videos."""
        return self._has_media

    def prompt(self, row: int, uid: str) -> Prompt:
        """The prompt of a row number, as the visit `uid`; as it is when it is too long to be played.

        Raises:
            ValueError: the row cannot be a prompt; the sentence names it.
        """
        source = self._prepare(self._rows[row], f"train row {row}")
        dataset = PromptDataset([source], self._tokenizer, self._config, "train", first_row=row)
        return dataclasses.replace(dataset.prompt(0, uid), row=row)

    def skip_reason(self, prompt: Prompt) -> str:
        """Reason why a visited prompt is skipped; empty when it is not."""
        if self._is_filtered and len(prompt.token_ids) > self._limit:
            return f"prompt longer than data.max_prompt_tokens={self._limit}"
        return ""

    def report(self) -> str:
        """One line: how many rows, and how many of those that were tried are too long."""
        line = f"train: {len(self)} rows, read and encoded when they are visited (data.streaming)"
        if self._num_too_long:
            line += (
                f"; {self._num_too_long} of {self._num_tried} tried are longer than data.max_prompt_tokens="
                f"{self._limit} and are passed over"
            )
        return line
