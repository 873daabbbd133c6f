"""Data in: rows from files, prompts from rows, and the order in which they are visited.

    folders.py, readers.py               rows from files and folders, all in memory
    stored.py                            those of a split: in memory, or by number from their files
    cache.py                             what is kept for the next run, within a bound
    rows.py, chat.py, media.py           one row through the column mapping, the chat template, a reader of media
    encoding.py                          token ids of many prompts, kept for the next run
    prompts.py, streaming.py             PromptDataset and StreamedPrompts
    mixing.py, sampler.py                how often, and in which order, rows are visited
    curriculum.py                        orders by name, and those of a user's own

`strop.data.tiny`, which makes a small model folder, is imported by those who want one, not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from strop.data.chat import Chat, render, require_chat_template
    from strop.data.config import DataConfig
    from strop.data.curriculum import RowResult, register_sampler
    from strop.data.mixing import check_source_weights, visits_per_epoch
    from strop.data.prompts import PromptDataset
    from strop.data.readers import read_rows
    from strop.data.sampler import PromptSampler, parse_visit_uid, val_uid, visit_uid

__all__ = [
    "Chat",
    "DataConfig",
    "PromptDataset",
    "PromptSampler",
    "RowResult",
    "check_source_weights",
    "parse_visit_uid",
    "read_rows",
    "register_sampler",
    "render",
    "require_chat_template",
    "val_uid",
    "visit_uid",
    "visits_per_epoch",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".chat": "Chat render require_chat_template",
        ".config": "DataConfig",
        ".curriculum": "RowResult register_sampler",
        ".mixing": "check_source_weights visits_per_epoch",
        ".prompts": "PromptDataset",
        ".readers": "read_rows",
        ".sampler": "PromptSampler parse_visit_uid val_uid visit_uid",
    },
)
