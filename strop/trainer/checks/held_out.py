"""A validation on rows that are trained on, which says nothing about others."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.data.config import DataConfig
from strop.data.entries import split_entry
from strop.data.preference_config import PreferDataConfig
from strop.data.preference_rows import PreferenceDataset
from strop.data.prompt_loader import TrainingPrompts
from strop.data.prompts import PromptDataset
from strop.data.readers import leaves
from strop.data.sft.config import SftDataConfig
from strop.data.sft.dataset import SftDataset
from strop.protocol.trajectory import Prompt
from strop.utils.remote_path import is_hub, is_url
from strop.utils.verdict import Check

_PLACES = ("id", "uid", "split", "index")
"""Columns and entries of extra_info that say which row it is and where it is from."""


def check_prompts(data: DataConfig, train: TrainingPrompts, prompts: Sequence[Prompt]) -> Check | None:
    """A warning about validation prompts that are trained on; None where there are none.

    Rows are the same where all of them but their places are, whatever the order of keys, and whether a value is null or
    absent. Rows that are streamed, and those with media, are not looked at: there the files count.
    """
    entries = [] if data.dataset_class.is_on else _shared_entries(data)
    texts = [prompt for prompt in prompts if not prompt.media]
    if not isinstance(train, PromptDataset):
        return _check("data", entries, 0, num_compared=0, num_val=len(prompts))
    asked = {array("i", prompt.token_ids).tobytes() for prompt in texts}
    rows = [row for row in train.row_numbers if train.token_ids(row).tobytes() in asked]
    trained = {_identity(train.prompt(row, "train")) for row in rows}
    num_shared = sum(_identity(prompt) in trained for prompt in texts)
    return _check("data", entries, num_shared, num_compared=len(texts), num_val=len(prompts))


def check_examples(
    section: str,
    data: SftDataConfig | PreferDataConfig,
    train: SftDataset | PreferenceDataset,
    val: SftDataset | PreferenceDataset,
) -> Check | None:
    """The same of conversations, or of comparisons; `section` is the full key of `data`."""
    held_out = Counter(identity for index in range(len(val)) if (identity := val.identity(index)))
    identities = (train.identity(index) for index in range(len(train)))
    num_shared = sum(held_out[identity] for identity in {row for row in identities if row in held_out})
    return _check(section, _shared_entries(data), num_shared, num_compared=held_out.total(), num_val=len(val))


def _identity(prompt: Prompt) -> bytes:
    row = {
        "tokens": prompt.token_ids, "source": prompt.data_source, "truth": prompt.ground_truth,
        "agent": prompt.agent_name, "extra_info": _without_places(prompt.extra_info),
        "columns": _without_places(prompt.columns),
    }  # fmt: skip
    return hashlib.blake2b(repr(_canonical(row)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _without_places(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if name not in _PLACES}


def _canonical(value: Any) -> Any:
    """The same for mappings of another order or with nulls, and for 7 and 7.0."""
    if isinstance(value, Mapping):
        known = {str(name): _canonical(inner) for name, inner in value.items() if inner is not None}
        return "mapping", sorted(known.items())
    if isinstance(value, (list, tuple)):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shared_entries(data: DataConfig | SftDataConfig | PreferDataConfig) -> list[str]:
    """Entries of val_files with a file that one of train_files has too, be it by another path, through a link, or in a
    folder."""
    trained = {place for entry in data.train_files for place in _places(entry)}
    return [entry for entry in data.val_files if not trained.isdisjoint(_places(entry))]


def _places(entry: str) -> list[Hashable]:
    if is_url(entry) or is_hub(entry):
        return [entry]
    path, _ = split_entry(entry)
    if not path.exists():  # a class of the user's own may make anything of the name
        return [entry]
    try:
        files = leaves(entry, "")
    except ValueError:  # as above, of what it holds
        files = [path]
    return [(status.st_dev, status.st_ino) for status in map(Path.stat, files)]


def _check(
    section: str, entries: Sequence[str], num_shared: int, *, num_compared: int, num_val: int
) -> Check | None:
    """The check of what both have.

    Args:
        section: full key.
        entries: of val_files, which both have.
        num_shared: rows of val_files that both have, of those that are compared.
        num_compared: rows of val_files that are compared.
        num_val: all of them.
    """
    is_whole = num_compared == num_val
    if not num_shared and (is_whole or not entries):
        return None
    both = f"{', '.join(entries)} {'is' if len(entries) == 1 else 'are'} in both"
    train, val = f"{section}.train_files", f"{section}.val_files"
    if num_shared:
        kind = "rows" if is_whole else "rows without images"
        text = f"{num_shared} of the {num_compared} {kind} of {val} are also in {train}"
        text += f" ({both})" if entries else ""
    else:
        text = f"{val} and {train} have rows in common: {both}"
    return Check(
        name="validation",
        text=text,
        level="warn",
        advice=f"a validation on what is trained shows what was memorized; give {val} other rows",
    )
