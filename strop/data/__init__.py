"""Data in: rows from files, prompts from rows, and the order in which they are visited.

bad_rows.py              Rows that cannot be used, counted and reported together
chat.py                  Conversations of rows, rendered to text and token ids
config.py                DataConfig
curriculum.py            Orders of the rows of an epoch (data.sampler)
data_generator.py        Rows that are made while a run goes on, in verl's form
dataset_class.py         Rows of a class of the user's own, in verl's form
dataset_class_config.py  Settings of data.dataset_class and data.datagen
entries.py               Entries of data.train_files as files and folders of this machine
file_check.py            Report on data files before a run (`strop data check`)
folders.py               Data files of a folder
hub_rows.py              Rows of hubs and URLs
huggingface_sets.py      Data sets of the Hugging Face hub at one commit
json_rows.py             Rows of JSON and JSON-lines files
loading.py               Rows of a split, as the settings say
media.py                 Columns and message parts that hold images, videos or sound
media_rows.py            Images and videos of rows, with their numbers of tokens
modelscope_sets.py       Data sets of ModelScope at one state
preference_config.py     PreferConfig
preference_rows.py       PreferenceDataset: tokenised answers to the same prompt
prepare.py               Well-known data sets, from their raw rows to verl's schema
prompt_loader.py         The prompts of a step
prompts.py               PromptDataset: rows as token ids
readers.py               Rows from files, folders, hubs and URLs, all in memory
rendering.py             Texts of many conversations, rendered at once
rlhf_dataset.py          RLHFDataset and collate_fn in the conventions of verl
rows.py                  One row through the column mapping
sampler.py               PromptSampler: the rows that a step visits
sampler_class.py         Samplers as classes, in verl's form
template_omissions.py    Tools and tool calls that the text of a chat template lacks
tiny_model.py            A small model folder with random weights
visit_ids.py             Ids of visits
cache/                   Cache of fetched files, token ids and indexes
dynamic_dataset/         Training rows that come while a run goes on
mixture/                 Visits of the rows of each data source per epoch
sft/                     Rows of supervised fine-tuning
streaming/               Training rows that are read when they are visited
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
