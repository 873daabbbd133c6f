"""The data sets of hubs that a run reads: their commits are looked up when it starts, and kept.

They stand in `models.json`, under keys such as `data hub:openai/gsm8k`, one for each set and revision; a run
that goes on, and a command that reads the data of a run, read at the same commits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.base.elsewhere import is_hub
from strop.base.guests import targets
from strop.hub.rows import commit_of, parse_hub
from strop.trainer.config import Config
from strop.trainer.models import Located, read_models

Records = Mapping[str, Mapping[str, Any]]


def with_data(
    located: Located, command: Sequence[str], *, say: Callable[[str], None], known: Records | None = None
) -> Located:
    """The same with every data set of a hub at a commit; arguments and errors as `strop.trainer.models.with_data`."""
    found: dict[str, Mapping[str, Any]] = {}

    def at_commit(entry: str) -> str:
        if not is_hub(entry):
            return entry
        key = _key_of(entry)
        if key not in found:
            source = parse_hub(entry)
            commit = str((known or {}).get(key, {}).get("revision", "")) or commit_of(entry, say)
            kind = "modelscope" if source.hub == "modelscope:" else "huggingface"
            found[key] = {"source": f"{source.hub}{source.name}", "kind": kind, "revision": commit}
        return _at(entry, str(found[key]["revision"]))

    config = _with_files(located.config, _section_of(*command), at_commit)
    return Located(config=config, models={**located.models, **found}) if found else located


def as_recorded(config: Config, run: Path) -> Config:
    """As `strop.trainer.models.data_as_recorded`."""
    known = read_models(run)

    def at_commit(entry: str) -> str:
        commit = str(known.get(_key_of(entry), {}).get("revision", "")) if is_hub(entry) else ""
        return _at(entry, commit) if commit else entry

    return _with_files(config, "", at_commit) if known else config


def _key_of(entry: str) -> str:
    """What the data set and the revision of an entry are recorded under."""
    source = parse_hub(entry)
    return f"data {source.hub}{source.name}{source.revision and '#'}{source.revision}"


def _at(entry: str, commit: str) -> str:
    return f"{entry.partition('#')[0]}#{commit}"


def _with_files(config: Any, section: str, change: Callable[[str], str]) -> Any:
    """The settings with other entries in the files of a section; empty: those of the core."""
    holder = getattr(config, section) if section else config
    files = {name: tuple(map(change, getattr(holder.data, name))) for name in ("train_files", "val_files")}
    holder = dataclasses.replace(holder, data=dataclasses.replace(holder.data, **files))
    return dataclasses.replace(config, **{section: holder}) if section else holder


def _section_of(word: str = "train") -> str:
    """The section of the guest whose command this is; empty where the settings of the core say what is read."""
    room = targets("command").get(word, "").split(".")[1:2]
    return next((name for name, where in targets("section").items() if where.split(".")[1:2] == room), "")
