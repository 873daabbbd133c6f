"""Prompts from rows: column mapping, chat template, length filter."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from strop.data.chat import Chat, encode_all, render, require_chat_template, to_chat, to_messages
from strop.data.config import DataConfig
from strop.trajectory import Prompt

_TOKENIZER_BATCH = 512
"""Texts per call of the tokenizer: enough to amortise the call, few enough to stay small in memory."""
_MEDIA_KEYS = ("images", "videos", "audios")
_OTHER_ANSWER_KEYS = ("answer", "solution", "ground_truth", "target", "label")
"""Columns that data sets of the field use for the right answer; offered when the mapped one is missing."""


class PromptDataset:
    """The prompts of one split, as token ids, without those that are too long.

    A prompt is named by its row number in the files, before the filter, so that a name stays valid when the
    filter changes.

    Args:
        rows: from `read_rows`.
        tokenizer: with a chat template.
        config: column names and limits.
        split: `val` keeps at most max_val_prompts; also the word for the rows in messages.

    Raises:
        ValueError: a column is missing, a row is malformed, the tokenizer has no chat template, a prompt is
            too long and the filter is off, or no prompt is left.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        split: Literal["train", "val"],
    ) -> None:
        require_chat_template(tokenizer)
        if not rows:
            raise ValueError(f"{split} data has no rows; check data.{split}_files")
        self.split = split
        self._source_rows = rows
        self._config = config
        self._check_columns()
        encoded = self._encode(tokenizer)
        self._ids = self._filter(encoded)
        self._num_before_filter = len(encoded)

    @property
    def row_numbers(self) -> tuple[int, ...]:
        """Rows that are kept, in the order of the files; what `prompt` accepts and a sampler visits."""
        return tuple(self._ids)

    @property
    def num_filtered(self) -> int:
        """Rows dropped because their prompt was too long."""
        return self._num_filtered

    def __len__(self) -> int:
        return len(self._ids)

    def prompt(self, row: int, uid: str) -> Prompt:
        """The prompt of a row number, as the visit `uid`.

        Raises:
            KeyError: the row does not exist or was dropped.
        """
        if row not in self._ids:
            raise KeyError(f"row {row} is not among the {len(self)} rows of the {self.split} prompts")
        config, source = self._config, self._source_rows[row]
        named = {config.prompt_key, config.data_source_key, "extra_info", "agent_name"}
        if config.ground_truth_key is not None and "." in config.ground_truth_key:
            named.add(
                config.ground_truth_key.split(".")[0]
            )  # a plain column stays: TRL rewards take it by name
        return Prompt(
            uid=uid,
            row=row,
            token_ids=tuple(self._ids[row]),
            messages=self._messages(row),
            data_source=str(source.get(config.data_source_key) or config.default_data_source),
            ground_truth=self._ground_truth(source),
            extra_info=self._extra_info(row),
            agent_name=source.get("agent_name") or "single_turn",
            columns={key: value for key, value in source.items() if key not in named},
        )

    def report(self) -> str:
        """One line: how many prompts, how long, how many dropped."""
        lengths = [len(ids) for ids in self._ids.values()]
        line = (
            f"{self.split}: {len(self)} prompts of {min(lengths)} to {max(lengths)} tokens (median "
            f"{statistics.median_low(lengths)})"
        )
        if self._num_filtered:
            share = 100 * self._num_filtered / self._num_before_filter
            line += (
                f"; dropped {self._num_filtered} ({share:.1f} %) longer than data.max_prompt_tokens="
                f"{self._config.max_prompt_tokens}"
            )
        num_left_out = self._num_before_filter - self._num_filtered - len(self)
        if num_left_out:
            line += f"; {num_left_out} left out by data.max_val_prompts={self._config.max_val_prompts}"
        return line

    def _where(self, row: int) -> str:
        return f"{self.split} row {row}"

    def _check_columns(self) -> None:
        """Report all columns that the mapping names and a row lacks, in one error."""
        config = self._config
        for row, source in enumerate(self._source_rows):
            missing = []
            if source.get(config.prompt_key) is None:
                missing.append(f"{config.prompt_key!r} (the prompt; map it with data.prompt_key)")
            if not (source.get(config.data_source_key) or config.default_data_source):
                missing.append(
                    f"{config.data_source_key!r} (selects the scorer; map it with data.data_source_key, or "
                    f"name one for all rows with data.default_data_source)"
                )
            if config.ground_truth_key is not None and self._ground_truth(source) is None:
                missing.append(
                    f"{config.ground_truth_key!r} (the right answer; map it with data.ground_truth_key"
                    f"{_suggestion(source)}, or set that to null when the reward function needs none)"
                )
            if missing:
                raise ValueError(
                    f"{self._where(row)} has no value for {'; none for '.join(missing)}; columns found: "
                    f"{', '.join(source)}"
                )

    def _ground_truth(self, source: Mapping[str, Any]) -> Any:
        value: Any = source
        for name in (self._config.ground_truth_key or "").split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(name)
        return value

    def _messages(self, row: int) -> tuple[dict[str, Any], ...]:
        key = self._config.prompt_key
        return to_messages(self._source_rows[row][key], role="user", where=self._where(row), key=key)

    def _extra_info(self, row: int) -> Mapping[str, Any]:
        extra_info = self._source_rows[row].get("extra_info")
        if extra_info is None:
            return {}
        if not isinstance(extra_info, Mapping):
            raise ValueError(
                f"{self._where(row)}: column 'extra_info' holds a {type(extra_info).__name__}; it must be an "
                f"object with named fields"
            )
        return extra_info

    def _chats(self) -> Iterator[Chat]:
        for row, source in enumerate(self._source_rows):
            media = [key for key in _MEDIA_KEYS if source.get(key)]
            if media:
                raise ValueError(
                    f"{self._where(row)} has {media[0]}, which are not given to the model yet: remove the "
                    f"column or use rows with text only"
                )
            self._extra_info(row)
            options = self._config.chat_template_kwargs
            yield to_chat(source, self._messages(row), options=options, where=self._where(row))

    def _encode(self, tokenizer: PreTrainedTokenizerBase) -> list[array[int]]:
        """Token ids of every row, before the filter; arrays take an eighth of what lists would."""
        encoded: list[array[int]] = []
        texts: list[str] = []
        for chat in self._chats():
            texts.append(render(tokenizer, chat, add_generation_prompt=True))
            if len(texts) == _TOKENIZER_BATCH:
                encoded.extend(array("i", ids) for ids in encode_all(tokenizer, texts))
                texts = []
        encoded.extend(array("i", ids) for ids in encode_all(tokenizer, texts))
        for row, ids in enumerate(encoded):
            if not ids:
                raise ValueError(
                    f"{self._where(row)} has a prompt of no tokens; check its messages and the chat template"
                )
        return encoded

    def _filter(self, encoded: Sequence[array[int]]) -> dict[int, array[int]]:
        limit = self._config.max_prompt_tokens
        kept = [row for row, ids in enumerate(encoded) if len(ids) <= limit]
        self._num_filtered = len(encoded) - len(kept)
        if self._num_filtered and not self._config.filter_overlong_prompts:
            first, longest = _first_over(encoded, limit), max(map(len, encoded))
            raise ValueError(
                f"{self._where(first)} has a prompt of {len(encoded[first])} tokens, over "
                f"data.max_prompt_tokens={limit}: raise that to {longest} to keep all rows, or set "
                f"data.filter_overlong_prompts=true to drop the {self._num_filtered} that are longer"
            )
        if not kept:
            shortest = min(map(len, encoded))
            raise ValueError(
                f"no {self.split} prompt is left: all {len(encoded)} are longer than data.max_prompt_tokens="
                f"{limit}; the shortest has {shortest} tokens, so raise it to at least {shortest}"
            )
        if self.split == "val" and self._config.max_val_prompts is not None:
            kept = _spread(kept, self._config.max_val_prompts)
        return {row: encoded[row] for row in kept}


def _first_over(encoded: Sequence[array[int]], limit: int) -> int:
    return next(row for row, ids in enumerate(encoded) if len(ids) > limit)


def _spread(rows: list[int], count: int) -> list[int]:
    """At most `count` rows at even distances, so that a file sorted by source or difficulty is covered."""
    if len(rows) <= count:
        return rows
    return [rows[index * len(rows) // count] for index in range(count)]


def _suggestion(source: Mapping[str, Any]) -> str:
    for key in _OTHER_ANSWER_KEYS:
        if source.get(key) is not None:
            return f"={key}"
    return ""
