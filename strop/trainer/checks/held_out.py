"""A validation on rows that are trained on, which says nothing about others."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Sequence

from strop.data.config import DataConfig
from strop.data.entries import split_entry
from strop.data.preference_config import PreferDataConfig
from strop.data.preference_rows import PreferenceDataset
from strop.data.prompt_loader import TrainingPrompts
from strop.data.prompts import PromptDataset
from strop.data.sft.config import SftDataConfig
from strop.data.sft.dataset import SftDataset
from strop.protocol.trajectory import Prompt
from strop.utils.remote_path import is_hub, is_url
from strop.utils.verdict import Check

_PLACES = ("split", "index")
"""Entries of extra_info that say where a row is from, as verl's data sets have them."""


def check_prompts(data: DataConfig, train: TrainingPrompts, prompts: Sequence[Prompt]) -> Check | None:
    """A warning about validation prompts that are trained on; None where there are none.

    Rows are the same where all of them but `split` and `index` in extra_info is. Rows that are streamed, and those with
    media, are not looked at: there the names of the files count.
    """
    is_held = isinstance(train, PromptDataset) and not train.has_media
    if not is_held or any(prompt.media for prompt in prompts):
        return _check("data", [] if data.dataset_class.is_on else _shared_entries(data), None, len(prompts))
    assert isinstance(train, PromptDataset), "as looked at above"
    asked = {array("i", prompt.token_ids).tobytes() for prompt in prompts}
    rows = [row for row in train.row_numbers if train.token_ids(row).tobytes() in asked]
    trained = {_identity(train.prompt(row, "train")) for row in rows}
    num_shared = sum(_identity(prompt) in trained for prompt in prompts)
    return _check("data", _shared_entries(data), num_shared, len(prompts))


def check_examples(
    section: str,
    data: SftDataConfig | PreferDataConfig,
    train: SftDataset | PreferenceDataset,
    val: SftDataset | PreferenceDataset,
) -> Check | None:
    """The same of conversations, or of comparisons; `section` is the full key of `data`."""
    num_shared = None
    if not (train.has_media or val.has_media):
        held_out = Counter(val.identity(index) for index in range(len(val)))
        identities = (train.identity(index) for index in range(len(train)))
        num_shared = sum(held_out[identity] for identity in {row for row in identities if row in held_out})
    return _check(section, _shared_entries(data), num_shared, len(val))


def _identity(prompt: Prompt) -> str:
    extra_info = {name: value for name, value in prompt.extra_info.items() if name not in _PLACES}
    return repr((
        prompt.token_ids, prompt.data_source, prompt.ground_truth, extra_info, prompt.agent_name, dict(prompt.columns)
    ))  # fmt: skip


def _shared_entries(data: DataConfig | SftDataConfig | PreferDataConfig) -> list[str]:
    """Entries of val_files that name what one of train_files does, be it by another path or through a link."""
    trained = {_place(entry) for entry in data.train_files}
    return [entry for entry in data.val_files if _place(entry) in trained]


def _place(entry: str) -> Hashable:
    if is_url(entry) or is_hub(entry):
        return entry
    path, split = split_entry(entry)
    if not path.exists():  # a class of the user's own may make anything of the name
        return entry
    status = path.stat()
    return status.st_dev, status.st_ino, split


def _check(section: str, entries: Sequence[str], num_shared: int | None, num_val: int) -> Check | None:
    if not num_shared and (num_shared is not None or not entries):
        return None
    both = f"{', '.join(entries)} {'is' if len(entries) == 1 else 'are'} in both"
    train, val = f"{section}.train_files", f"{section}.val_files"
    if num_shared is None:
        text = f"{val} and {train} have rows in common: {both}"
    else:
        text = f"{num_shared} of the {num_val} rows of {val} are also in {train}"
        text += f" ({both})" if entries else ""
    return Check(
        name="validation",
        text=text,
        level="warn",
        advice=f"a validation on what is trained shows what was memorized; give {val} other rows",
    )
