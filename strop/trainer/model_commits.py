"""Record of the models and data sets that a run has fetched.

`models.json` in the run folder says for each key where its model came from: the revision that was resolved, and size
and SHA-256 of every file. A run that goes on uses exactly these. Data sets of hubs stand there too, with their commit,
under keys such as `data hub:openai/gsm8k`, one for each set and revision; a run that goes on, and a command that reads
the data of a run, read at the same commits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from strop.data.config import DataConfig
from strop.data.hub_rows import commit_of, parse_hub
from strop.data.preference_config import PreferDataConfig
from strop.data.sft.config import SftDataConfig
from strop.run import RunError
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.trainer.model_locations import Located
from strop.trainer.sections import SECTION_OF_COMMAND
from strop.utils.atomic_io import replace_text
from strop.utils.hub.models import hashes
from strop.utils.remote_path import is_hub
from strop.utils.safe_read import read_json

MODELS_FILE = "models.json"
Records = Mapping[str, Mapping[str, Any]]
D = TypeVar("D", DataConfig, SftDataConfig, PreferDataConfig)
"""Section with files of rows."""


def with_data(
    located: Located, command: Sequence[str], *, say: Reporter, known: Records | None = None
) -> Located:
    """The same with every data set of a hub at a commit.

    Args:
        located: of a run that starts or goes on.
        command: the word of the command that made the run, which tells what data it reads.
        say: hears of a hub that does not answer.
        known: records of an earlier part of the run.

    Raises:
        ValueError: the commit of one cannot be known; the sentence says why.
        UntrustedCode: received settings name it.
    """
    records: dict[str, Mapping[str, Any]] = {}

    def at_commit(entry: str) -> str:
        if not is_hub(entry):
            return entry
        key = _key_of(entry)
        if key not in records:
            source = parse_hub(entry)
            commit = str((known or {}).get(key, {}).get("revision", "")) or commit_of(entry, say)
            kind = "modelscope" if source.hub == "modelscope:" else "huggingface"
            records[key] = {"source": f"{source.hub}{source.name}", "kind": kind, "revision": commit}
        return _at(entry, str(records[key]["revision"]))

    config = _with_files(located.config, _section_of(*command), at_commit)
    return Located(config=config, models={**located.models, **records}) if records else located


def as_recorded(config: Config, run: Path) -> Config:
    """The settings of a command on a run, with each data set that the run has read at the commit it was read at.

    Args:
        config: of the command.
        run: folder of the run; what it did not read stays as it is.

    Raises:
        RunError: its records cannot be read.
    """
    records = read_models(run)

    def at_commit(entry: str) -> str:
        commit = str(records.get(_key_of(entry), {}).get("revision", "")) if is_hub(entry) else ""
        return _at(entry, commit) if commit else entry

    return _with_files(config, "", at_commit) if records else config


def _key_of(entry: str) -> str:
    """Key under which the data set and the revision of an entry are recorded."""
    source = parse_hub(entry)
    return f"data {source.hub}{source.name}{source.revision and '#'}{source.revision}"


def _at(entry: str, commit: str) -> str:
    return f"{entry.partition('#')[0]}#{commit}"


def _with_files(config: Config, section: str, change: Callable[[str], str]) -> Config:
    """The settings with other entries in the files of a section; empty: those of the core."""
    if section == "sft":
        sft = dataclasses.replace(config.sft, data=_with_entries(config.sft.data, change))
        return dataclasses.replace(config, sft=sft)
    if section == "prefer":
        prefer = dataclasses.replace(config.prefer, data=_with_entries(config.prefer.data, change))
        return dataclasses.replace(config, prefer=prefer)
    return dataclasses.replace(config, data=_with_entries(config.data, change))


def _with_entries(data: D, change: Callable[[str], str]) -> D:
    return dataclasses.replace(
        data, train_files=tuple(map(change, data.train_files)), val_files=tuple(map(change, data.val_files))
    )


def _section_of(word: str = "train") -> str:
    """The section whose data a command reads; empty for the section data of a training."""
    return SECTION_OF_COMMAND.get(word, "")


def write_models(run: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Record what was fetched, with the hash of every file; nothing where none was; data sets have no folder.

    Raises:
        OSError: the file cannot be written.
    """
    if models:
        records = {
            key: {**model, "files": hashes(Path(model["folder"]))} if "folder" in model else model
            for key, model in models.items()
        }
        replace_text(run / MODELS_FILE, json.dumps(records, indent=2) + "\n")


def read_models(run: Path) -> dict[str, dict[str, Any]]:
    """Content of MODELS_FILE; empty where all models are folders.

    Raises:
        RunError: the file cannot be used.
    """
    path = run / MODELS_FILE
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
        return {str(key): dict(model) for key, model in content.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} cannot be read, so it is not known which revision of its model the run uses ({error}): restore it"
        ) from error


def check_models_same(records: Mapping[str, Mapping[str, Any]], located: Located) -> None:
    """Compare every file of the fetched models with what the run recorded.

    Raises:
        RunError: one differs; the sentence names it.
    """
    for key, model in located.models.items():
        recorded = records.get(key, {}).get("files", {})
        files = hashes(Path(model["folder"]))
        changed = sorted(name for name in {*recorded, *files} if recorded.get(name) != files.get(name))
        if changed:
            raise RunError(
                f"{key}: {changed[0]} of {model['source']} in {model['folder']} is not the file that this run began "
                f"with: remove that folder, so that it is fetched again, or put the file back"
            )
