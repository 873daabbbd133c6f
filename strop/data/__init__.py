"""Data in: rows from files, prompts and conversations from rows, and the order in which they are visited.

    sources.py, folders.py, readers.py   rows from local files, folders, the hub and URLs
    rows.py, chat.py                     one row through the column mapping and the chat template
    encoding.py, truncation.py           token ids of many prompts, kept for the next run; cutting to a limit
    prompts.py, sft.py                   PromptDataset and SftDataset
    mixing.py, sampler.py                how often, and in which order, rows are visited
    checking.py, prepare.py              what is wrong with files; well-known data sets in the field's schema

`checking` and `prepare` are imported by their commands, not here; so are `strop.data.tiny`, which makes a small
model folder, and `strop.data.tasks`, a small verifiable task.
"""

from __future__ import annotations

from strop.data.chat import Chat, render, require_chat_template
from strop.data.config import DataConfig, SftDataConfig
from strop.data.mixing import check_source_weights, visits_per_epoch
from strop.data.prompts import PromptDataset
from strop.data.readers import read_rows
from strop.data.sampler import PromptSampler, parse_visit_uid, val_uid, visit_uid
from strop.data.sft import SftDataset, SftExample, tokenize_chat

__all__ = [
    "Chat",
    "DataConfig",
    "PromptDataset",
    "PromptSampler",
    "SftDataConfig",
    "SftDataset",
    "SftExample",
    "check_source_weights",
    "parse_visit_uid",
    "read_rows",
    "render",
    "require_chat_template",
    "tokenize_chat",
    "val_uid",
    "visit_uid",
    "visits_per_epoch",
]
