"""Prompts in: readers, chat template, length filter, sampler, and tokenised conversations for SFT.

`strop.data.tiny` makes a small model folder and `strop.data.tasks` a small verifiable task; neither is
imported here.
"""

from __future__ import annotations

from strop.data.chat import Chat, render, require_chat_template
from strop.data.config import DataConfig, SftDataConfig
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
    "parse_visit_uid",
    "read_rows",
    "render",
    "require_chat_template",
    "tokenize_chat",
    "val_uid",
    "visit_uid",
]
