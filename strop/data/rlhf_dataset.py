"""`RLHFDataset` and `collate_fn` in the conventions of verl, to be subclassed for data.dataset_class.

    from strop.data import RLHFDataset

    class MyDataset(RLHFDataset):
        def __getitem__(self, item):
            row = super().__getitem__(item)
            row["extra_info"]["level"] = 3
            return row

A subclass may also change `_read_files_and_tokenize`, which sets `self.dataframe` (a `datasets.Dataset`), or
`_build_messages`. Of verl's class it differs in this: `data_files` may be every entry of data.train_files; the
limit on lengths counts the schemas of a row's own tools, and a row that cannot be rendered is an error instead of
being dropped; columns with media stay in the row, and are put in the place of their placeholders where the prompt is
encoded.

A run calls `len()` and `[]` alone. `split`, `resume_dataset_state`, `return_full_prompt`, `return_raw_chat` and
`serialize_dataset` are there for code that is brought along and uses them.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow.parquet
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from strop.data.chat import encode_all, render_prompt, to_chat, to_messages
from strop.data.readers import check_entries, read_rows, without_filled_nulls
from strop.data.rows import columns_of
from strop.utils.sanitize import read_json

logger = logging.getLogger(__name__)

_BATCH = 512
"""Prompts per call of the tokenizer."""
_MEDIA = ("images", "videos", "audios")


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | NDArray[np.object_]]:
    """Rows as columns: tensors stacked on dim 0, all else as object arrays [B] whose entries stay what they are."""
    tensors: dict[str, list[Tensor]] = {}
    lists: dict[str, list[Any]] = {}
    for row in data_list:
        for key, value in row.items():
            if isinstance(value, Tensor):
                tensors.setdefault(key, []).append(value)
            else:
                lists.setdefault(key, []).append(value)
    columns: dict[str, Tensor | NDArray[np.object_]] = {
        key: torch.stack(values) for key, values in tensors.items()
    }
    for key, entries in lists.items():
        columns[key] = np.fromiter(entries, dtype=object, count=len(entries))
    return columns


class RLHFDataset(Dataset[dict[str, Any]]):
    """Rows of files, by number, with their prompt as messages.

    Args:
        data_files: one entry or several, as in data.train_files.
        tokenizer: with a chat template.
        config: settings with `get(name, default)`; see `strop.data.dataset_class.dataset_settings`.
        processor: of models that see images; kept for subclasses.
        max_samples: rows to keep, the first ones or, with config `shuffle`, some drawn by its `seed`; below 1: all.

    Raises:
        ValueError, FileNotFoundError: a file cannot be read, or a prompt cannot be rendered.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        files = [data_files] if isinstance(data_files, str | Path) else list(data_files)
        self.data_files = copy.deepcopy(files)
        self.original_data_files = copy.deepcopy(files)
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        self.max_samples = max_samples
        self.cache_dir = str(Path(config.get("cache_dir", "") or "~/.cache/strop").expanduser())
        self.prompt_key: str = config.get("prompt_key", "prompt")
        self.image_key: str = config.get("image_key", "images")
        self.video_key: str = config.get("video_key", "videos")
        self.max_prompt_length: int = config.get("max_prompt_length", 1024)
        self.return_raw_chat: bool = config.get("return_raw_chat", False)
        self.return_full_prompt: bool = config.get("return_full_prompt", False)
        self.truncation: str = config.get("truncation", "error")
        self.filter_overlong_prompts: bool = config.get("filter_overlong_prompts", True)
        self.apply_chat_template_kwargs: dict[str, Any] = dict(config.get("apply_chat_template_kwargs", {}))
        self.need_tools_kwargs: bool = config.get("need_tools_kwargs", False)
        self.shuffle: bool = config.get("shuffle", False)
        self.seed: int | None = config.get("seed", None)
        self.serialize_dataset = False
        self.dataframe: Any = None
        self._read_files_and_tokenize()

    def _read_files_and_tokenize(self) -> None:
        """Set `dataframe` from `data_files`, with at most `max_samples` rows, none of them too long."""
        check_entries(self.data_files)
        datasets = importlib.import_module("datasets")  # heavy, and only this class needs it
        if all(str(file).endswith(".parquet") and Path(file).is_file() for file in self.data_files):
            tables = [pyarrow.parquet.read_table(file) for file in self.data_files]
            frame = datasets.concatenate_datasets([datasets.Dataset(table) for table in tables])
        else:
            rows = read_rows(self.data_files, self.cache_dir)
            frame = datasets.Dataset.from_dict(columns_of(rows))
        if 0 < self.max_samples < len(frame):
            chosen = np.arange(self.max_samples)
            if self.shuffle:
                chosen = np.random.default_rng(self.seed).choice(
                    len(frame), size=self.max_samples, replace=False
                )
            frame = frame.select(chosen.tolist())
        self.dataframe = self.maybe_filter_out_long_prompts(frame)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """The rows whose prompt has at most `max_prompt_length` tokens, or all when they are not to be filtered.

        Prompts are encoded in batches, which fast tokenizers spread over threads.
        """
        frame = self.dataframe if dataframe is None else dataframe
        if not self.filter_overlong_prompts:
            return frame
        numbers_kept: list[int] = []
        for start in range(0, len(frame), _BATCH):
            numbers = range(start, min(start + _BATCH, len(frame)))
            texts = [self._render(dict(frame[number]), number) for number in numbers]
            for number, ids in zip(numbers, encode_all(self.tokenizer, texts), strict=True):
                if len(ids) <= self.max_prompt_length:
                    numbers_kept.append(number)
        if len(numbers_kept) == len(frame):
            return frame
        logger.warning(
            "%s dropped %d of %d rows (%s) whose prompt is longer than data.max_prompt_tokens=%d",
            type(self).__name__, len(frame) - len(numbers_kept), len(frame), ", ".join(map(str, self.data_files)),
            self.max_prompt_length, extra={"is_as_it_is": True},
        )  # fmt: skip
        return frame.select(numbers_kept)

    def _render(self, row: dict[str, Any], number: int) -> str:
        """The prompt through the chat template; media count as their placeholders."""
        where = f"row {number} of {type(self).__name__}"
        row = without_filled_nulls(row)
        messages = to_messages(self._build_messages(row), role="user", where=where, key=self.prompt_key)
        chat = to_chat(row, messages, options=self.apply_chat_template_kwargs, where=where)
        return render_prompt(self.tokenizer, chat)

    def _build_messages(self, example: dict[str, Any]) -> Any:
        """The prompt of a row: a list of messages, from a list, its JSON text, or a text that is one user message."""
        prompt = example[self.prompt_key]
        if not isinstance(prompt, str):
            return prompt
        try:
            read = read_json(prompt)
        except ValueError:
            read = None
        return read if isinstance(read, list) else [{"role": "user", "content": prompt}]

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """The row with `raw_prompt`, `index`, `tools_kwargs`, `interaction_kwargs` and `dummy_tensor` (uint8 [1])."""
        row: dict[str, Any] = {
            key: value for key, value in self.dataframe[item].items() if key not in _MEDIA or value
        }
        for key in ("reward_model", "extra_info"):
            if isinstance(row.get(key), str):
                row[key] = read_json(row[key])
        row["raw_prompt"] = self._build_messages(row)
        row["extra_info"] = dict(row.get("extra_info") or {})
        row["index"] = row["extra_info"].get("index", 0)
        row["tools_kwargs"] = row["extra_info"].get("tools_kwargs") or {}
        row["interaction_kwargs"] = row["extra_info"].get("interaction_kwargs") or {}
        row["dummy_tensor"] = torch.zeros(1, dtype=torch.uint8)
        return row

    def split(self, num_splits: int) -> list[Self]:
        """Data sets with consecutive rows each, as equal in number as can be; together all rows.

        Raises:
            ValueError: there are fewer rows than parts, or no part.
        """
        if not 1 <= num_splits <= len(self):
            raise ValueError(
                f"{len(self)} rows cannot be split into {num_splits} parts; use 1 to {len(self)}"
            )
        parts = []
        for numbers in np.array_split(np.arange(len(self)), num_splits):
            part = copy.copy(self)
            part.dataframe = self.dataframe.select(numbers.tolist())
            parts.append(part)
        return parts

    def resume_dataset_state(self) -> None:
        """Read the rows again from the files that were named at first, after a copy without them was restored."""
        self.data_files = copy.deepcopy(self.original_data_files)
        self._read_files_and_tokenize()

    def __getstate__(self) -> dict[str, Any]:
        """Without the rows unless `serialize_dataset`: they are read again by `resume_dataset_state`."""
        state = dict(self.__dict__)
        if not self.serialize_dataset:
            state.pop("dataframe", None)
        return state
