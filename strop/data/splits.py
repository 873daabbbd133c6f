"""The rows of a split, as the configuration names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from strop.base.guests import needed
from strop.data.config import DataConfig
from strop.data.readers import read_rows
from strop.data.stored import open_rows


def load_rows(
    config: DataConfig, split: Literal["train", "val"], tokenizer: Any, *, seed: int | None = None
) -> Sequence[dict[str, Any]]:
    """The rows of a split as `config` says: of its files or of a class of the user's own, held or read by number.

    Raises:
        ValueError, FileNotFoundError: the sentence says which file, class or row cannot be used.
    """
    files = config.train_files if split == "train" else config.val_files
    is_streamed = config.streaming and split == "train"
    if config.dataset_class.path:
        open_class = needed("rows of a class", "data.dataset_class is set")
        limit = config.max_train_prompts if split == "train" else config.max_val_prompts
        rows: Sequence[dict[str, Any]] = open_class(config, files, tokenizer, max_samples=limit, seed=seed)
        return rows if is_streamed else list(rows)
    return open_rows(files, config.cache_dir) if is_streamed else read_rows(files, config.cache_dir)
