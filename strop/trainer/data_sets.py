"""The data sets of the hub that a run reads: their commits are looked up when it starts, and kept.

They stand in `models.json`, under keys such as `data hub:openai/gsm8k`, one for each set and revision; a run
that goes on reads at the same commits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strop.base.guests import targets
from strop.data.sources import HUB_PREFIX, commit_of, parse_hub
from strop.trainer.models import Located


def with_data(
    located: Located,
    command: Sequence[str],
    *,
    say: Callable[[str], None],
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> Located:
    """The same with every data set of the hub at a commit.

    Args:
        located: of a run that starts or goes on.
        command: the word of the command that made the run, which tells what data it reads.
        say: hears of a hub that does not answer.
        known: what an earlier part of the run resolved.

    Raises:
        ValueError: the commit of one cannot be known; the sentence says why.
        UntrustedCode: received settings name it.
    """
    found: dict[str, Mapping[str, Any]] = {}

    def at_commit(entry: str) -> str:
        if not entry.startswith(HUB_PREFIX):
            return entry
        source = parse_hub(entry)
        text = f"{HUB_PREFIX}{source.name}"
        key = f"data {text}{source.revision and '#'}{source.revision}"
        if key not in found:
            commit = str((known or {}).get(key, {}).get("revision", "")) or commit_of(entry, say)
            found[key] = {"source": text, "kind": "huggingface", "revision": commit}
        return f"{entry.partition('#')[0]}#{found[key]['revision']}"

    config: Any = located.config
    section = _section_of(*command)
    holder = getattr(config, section) if section else config
    files = {name: tuple(map(at_commit, getattr(holder.data, name))) for name in ("train_files", "val_files")}
    if not found:
        return located
    holder = dataclasses.replace(holder, data=dataclasses.replace(holder.data, **files))
    config = dataclasses.replace(config, **{section: holder}) if section else holder
    return Located(config=config, models={**located.models, **found})


def _section_of(word: str = "train") -> str:
    """The section of the guest whose command this is; empty where the settings of the core say what is read."""
    room = targets("command").get(word, "").split(".")[1:2]
    return next((name for name, where in targets("section").items() if where.split(".")[1:2] == room), "")
