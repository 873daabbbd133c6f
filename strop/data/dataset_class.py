"""Rows of a class of the user's own (data.dataset_class), in verl's calling convention.

    MyDataset(data_files, tokenizer, config, processor=None, max_samples=-1)
    len(dataset), dataset[i] -> a row as a dictionary

A row has the columns of a file's row. The prompt may stand under `raw_prompt`, and `index`, `tools_kwargs` and
`interaction_kwargs` beside `extra_info` instead of in it. Tensors are left out: token ids are made here, from the
messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch

from strop.algorithms.verl_config import VerlConfig
from strop.data.config import DataConfig
from strop.data.readers import without_filled_nulls
from strop.protocol import DataProto
from strop.utils.sanitize import encodable_value
from strop.utils.user_files import load_user_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RAW_PROMPT = "raw_prompt"
_BESIDE_EXTRA_INFO = ("index", "tools_kwargs", "interaction_kwargs")


def dataset_settings(config: DataConfig, seed: int | None) -> VerlConfig:
    """The `config` of a dataset class: data.* under verl's names and under ours."""
    custom_class = config.dataset_class
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return VerlConfig(
        {
            **settings,
            "train_files": list(config.train_files),
            "val_files": list(config.val_files),
            "cache_dir": config.cache_dir or "~/.cache/strop",
            "max_prompt_length": config.max_prompt_tokens,
            "max_response_length": config.max_response_tokens,
            "train_batch_size": config.prompts_per_step,
            "train_max_samples": config.max_train_prompts or -1,
            "val_max_samples": config.max_val_prompts or -1,
            "reward_fn_key": config.data_source_key,
            "apply_chat_template_kwargs": dict(config.chat_template_kwargs),
            "return_raw_chat": True,
            "return_full_prompt": False,
            "return_raw_input_ids": False,
            "return_multi_modal_inputs": False,
            "need_tools_kwargs": False,
            "filter_overlong_prompts_workers": 1,
            "tool_config_path": None,
            "use_shm": False,
            "shuffle": False,  # rows are put in order by data.sampler, by their numbers
            "seed": seed,
            "custom_cls": {"path": custom_class.path, "name": custom_class.name},
        }
    )


class CustomRows(Sequence[dict[str, Any]]):
    """The rows of an object with `__len__` and `__getitem__`, each in the form of a file's row.

    Args:
        dataset: the object.
        label: its class and file, for messages.
        prompt_key: column that the prompt goes to.

    Raises:
        ValueError: it has no rows, and from a row: it is none.
    """

    def __init__(self, dataset: Any, *, label: str, prompt_key: str) -> None:
        self._dataset, self._label, self._prompt_key = dataset, label, prompt_key
        try:
            self._length = len(dataset)
        except Exception as error:
            raise ValueError(f"{label}: len() failed with {_reason(error)}") from error
        if self._length < 1:
            raise ValueError(f"{label} has {self._length} rows; a data set needs at least one")
        self.wants_batches = hasattr(dataset, "on_batch_end")
        """True if it may add rows after a step (on_batch_end)."""

    def restore(self, added: Sequence[Mapping[str, Any]]) -> None:
        """Restore rows that were added earlier; an object that is made anew need not know them."""

    def new_rows(self, batch: DataProto | None) -> list[dict[str, Any]]:
        """Call on_batch_end; returns the rows that it added.

        Raises:
            ValueError: it failed, or has fewer rows than before.
        """
        if batch is None:
            return []
        before = self._length
        try:
            self._dataset.on_batch_end(batch=batch)
            self._length = len(self._dataset)
        except Exception as error:
            raise ValueError(f"{self._label}: on_batch_end failed with {_reason(error)}") from error
        if self._length < before:
            raise ValueError(
                f"{self._label}: on_batch_end left {self._length} rows of {before}; rows may be added, and none taken "
                f"away, because samples name them by their numbers"
            )
        return self[before : self._length]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._length))]
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        try:
            item = self._dataset[index]
        except Exception as error:
            raise ValueError(f"{self._label}: row {index} failed with {_reason(error)}") from error
        if not isinstance(item, Mapping) or not all(isinstance(name, str) for name in item):
            raise ValueError(
                f"{self._label}: row {index} is a {type(item).__name__}, but __getitem__ must return a dictionary "
                f"of columns such as {self._prompt_key}, data_source and reward_model"
            )
        return self._as_row(without_filled_nulls(encodable_value(dict(item))))  # most classes hold tables

    def _as_row(self, item: Mapping[str, Any]) -> dict[str, Any]:
        row = {name: value for name, value in item.items() if not isinstance(value, torch.Tensor)}
        raw_prompt = row.pop(RAW_PROMPT, None)
        if raw_prompt is not None:
            row[self._prompt_key] = list(raw_prompt) if not isinstance(raw_prompt, str) else raw_prompt
        extra_info = row.get("extra_info")
        beside = {name: row.pop(name) for name in _BESIDE_EXTRA_INFO if name in row}
        beside = {name: value for name, value in beside.items() if value is not None and value != {}}
        if extra_info is None or isinstance(
            extra_info, Mapping
        ):  # else the row is refused later, by its column
            row["extra_info"] = {**beside, **(extra_info or {})}
        return row


def open_custom(
    config: DataConfig,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_samples: int | None,
    seed: int | None,
) -> CustomRows:
    """The rows of data.dataset_class for these files.

    Raises:
        ValueError: the file or class is missing, or making the object failed; the sentence names the class.
    """
    custom_class = config.dataset_class
    label = f"data.dataset_class {custom_class.name} of {custom_class.path}"
    make = load_user_class(custom_class.path, custom_class.name, setting="data.dataset_class")
    try:
        dataset = make(
            list(files),
            tokenizer,
            dataset_settings(config, seed),
            processor=None,
            max_samples=-1 if max_samples is None else max_samples,
        )
    except Exception as error:
        raise ValueError(
            f"{label} cannot be made: {_reason(error)}; it is called as {custom_class.name}(data_files, tokenizer, "
            f"config, processor=None, max_samples=-1)"
        ) from error
    return CustomRows(dataset, label=label, prompt_key=config.prompt_key)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
