"""Rows of a split as the section data says: of files, streamed or held, or of a class of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from strop.config.sections import where_on
from strop.data.config import DataConfig
from strop.data.readers import read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_rows(
    config: DataConfig,
    split: Literal["train", "val"],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    seed: int | None = None,
) -> Sequence[dict[str, Any]]:
    """The rows of a split as `config` says, held or read by number.

    Raises:
        ValueError, FileNotFoundError: the sentence says which file, class or row cannot be used.
    """
    files = config.train_files if split == "train" else config.val_files
    is_streamed = config.streaming and split == "train"
    if where_on(config.dataset_class) is not None:
        from strop.data.dataset_class import open_custom  # torch: seconds

        limit = config.max_train_prompts if split == "train" else config.max_val_prompts
        rows = open_custom(config, files, tokenizer, max_samples=limit, seed=seed)
        wants_batches = rows.wants_batches and split == "train"
        return rows if is_streamed or wants_batches else list(rows)
    if is_streamed:
        from strop.data.streaming import open_rows  # tokenizers: seconds

        return open_rows(files, config.cache_dir)
    return read_rows(files, config.cache_dir)
