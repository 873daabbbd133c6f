"""Data in: rows from files, prompts from rows, and the order in which they are visited.

    entries.py                           the files that settings name, and whether they are there
    readers.py, json_rows.py             rows from files and folders, all in memory
    loading.py                           rows of a split, as the settings say
    rows.py, chat.py, media.py           one row through the column mapping, the chat template, a reader of media
    prompts.py, prompt_loader.py               PromptDataset, with the token ids of all; the prompts of a step
    sampler.py, curriculum.py            the visits of a step, in the order of an epoch
    visit_ids.py                         ids of visits

Below it: `cache`, what is kept for the next run; `curriculum`, orders by results, and those of a user's own;
`command`, which is `strop data`; `growing`, rows that come while a run goes on; `mixing`, how often the rows of each
source are visited; `streaming`, rows that are read when they are visited; `tiny`, which makes a small model folder;
`hub_rows`, rows of hubs and URLs, with `huggingface_sets` and `modelscope_sets`; `folders`, files of a folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.data.chat import Chat, render, require_chat_template
    from strop.data.config import DataConfig
    from strop.data.curriculum import RowResult, register_sampler
    from strop.data.data_generator import AbstractDataGenerator
    from strop.data.mixture import check_source_weights, visits_per_epoch
    from strop.data.prompts import PromptDataset
    from strop.data.readers import read_rows
    from strop.data.rlhf_dataset import RLHFDataset, collate_fn
    from strop.data.sampler import PromptSampler
    from strop.data.sampler_class import AbstractCurriculumSampler, AbstractSampler
    from strop.data.sft.config import SftDataConfig
    from strop.data.sft.conversations import tokenize_chat
    from strop.data.sft.dataset import SftDataset
    from strop.data.sft.stored_conversation import SftExample
    from strop.data.visit_ids import parse_visit_uid, val_uid, visit_uid

__all__ = [
    "AbstractCurriculumSampler",
    "AbstractDataGenerator",
    "AbstractSampler",
    "Chat",
    "DataConfig",
    "PromptDataset",
    "PromptSampler",
    "RLHFDataset",
    "RowResult",
    "SftDataConfig",
    "SftDataset",
    "SftExample",
    "check_source_weights",
    "collate_fn",
    "parse_visit_uid",
    "read_rows",
    "register_sampler",
    "render",
    "require_chat_template",
    "tokenize_chat",
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
        ".mixture": "check_source_weights visits_per_epoch",
        ".prompts": "PromptDataset",
        ".readers": "read_rows",
        ".sampler": "PromptSampler",
        ".visit_ids": "parse_visit_uid val_uid visit_uid",
        "strop.data.data_generator": "AbstractDataGenerator",
        "strop.data.rlhf_dataset": "RLHFDataset collate_fn",
        "strop.data.sampler_class": "AbstractCurriculumSampler AbstractSampler",
        "strop.data.sft.config": "SftDataConfig",
        "strop.data.sft.conversations": "tokenize_chat",
        "strop.data.sft.dataset": "SftDataset",
        "strop.data.sft.stored_conversation": "SftExample",
    },
)
